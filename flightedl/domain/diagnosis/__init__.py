"""What is wrong with a job, said from what its processes say: observations in, findings out, nothing else.

``observations`` are what was seen, asked of everybody at about the same time. ``findings`` are what follows: a cause,
whom it is about, and what to try next. ``examine`` puts the rules together: those of ``servers`` (etcd, master,
pservers), of ``trainers`` (who waits for whom, and why) of ``work`` (data, tasks, checkpoints), and of ``probes``
(what was tried out from here: storage, disks, certificates). ``profile`` says
where the time of trainers goes.

A rule says what it can tell from what was seen, and is silent where it cannot tell. A consequence of another finding is
left out where it would only hide the cause.
"""
