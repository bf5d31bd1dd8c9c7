// Shows the master's updates, without a library or anything from elsewhere. Texts are set as text, never as HTML.
"use strict";

const $ = (id) => document.getElementById(id);
let curves = {};
let events = [];

function element(name, text, more = {}) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  for (const [key, value] of Object.entries(more)) made.setAttribute(key, value);
  return made;
}

const number = (value) => new Intl.NumberFormat("en", { maximumSignificantDigits: 4 }).format(value);
function bytes(value) {
  if (!value) return "";
  const power = Math.min(4, Math.floor(Math.log2(value) / 10));
  return `${new Intl.NumberFormat("en", { maximumSignificantDigits: 3 }).format(value / 2 ** (10 * power))} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}
const time = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");
const seconds = (value) => (value < 90 ? Math.round(value) + " s" : value < 5400 ? Math.round(value / 60) + " min"
  : number(value / 3600) + " h");

function table(where, caption, titles, rows, bad = () => false, totals = undefined) {
  const holder = $(where);
  if (!rows.length) {
    holder.replaceChildren(element("p", caption + ": none.", { class: "empty" }));
    return;
  }
  const made = element("table");
  made.append(element("caption", caption));
  const head = element("tr");
  for (const title of titles) head.append(element("th", title, { scope: "col" }));
  made.append(element("thead"));
  made.tHead.append(head);
  const body = element("tbody");
  rows.forEach((row, place) => {
    const line = element("tr", undefined, bad(place) ? { class: "bad" } : {});
    for (const cell of row) {
      const text = String(cell ?? "");
      line.append(element("td", text, text.length > 40 ? { class: "long" } : {}));
    }
    body.append(line);
  });
  made.append(body);
  if (totals && rows.length > 1) {
    const foot = made.createTFoot().insertRow();
    for (const cell of ["total", ...totals]) foot.append(element("td", String(cell ?? "")));
  }
  const scrolling = element("div", undefined, { class: "table", tabindex: "0", role: "region", "aria-label": caption });
  scrolling.append(made);
  const before = holder.firstElementChild;
  const [left, top] = before ? [before.scrollLeft, before.scrollTop] : [0, 0];
  const isFocused = holder.contains(document.activeElement);
  holder.replaceChildren(scrolling);
  [scrolling.scrollLeft, scrolling.scrollTop] = [left, top];
  if (isFocused) scrolling.focus();
}

function remaining() {
  const points = (curves.progress ?? []).slice(-60);
  if (points.length < 3) return "";
  const [first, last] = [points[0], points[points.length - 1]];
  const rate = (last[1] - first[1]) / (last[0] - first[0]);
  return rate > 0 && last[1] < 1 ? "about " + seconds((1 - last[1]) / rate) : "";
}

function facts(status) {
  const tasks = status.tasks;
  const epoch = Math.min(status.epoch + 1, status.epochs ?? status.epoch + 1);
  const found = {
    epoch: status.epochs ? `${epoch} of ${status.epochs}` : epoch,
    tasks: `${tasks.done} done, ${tasks.pending} pending, ${tasks.todo} todo` + (tasks.failed ? `, ${tasks.failed} failed` : ""),
    records: `${status.records.toLocaleString("en")}, ${number(Math.round(status.records_per_s))} per second`,
    remaining: status.epochs ? remaining() : "",
    mode: status.mode,
    "local steps": localSteps(status),
    pservers: change(status.scaling),
    time: spent(status.profile),
    checkpoint: status.checkpoint && `${status.checkpoint}, ${seconds(status.checkpoint_age_s ?? 0)} old`,
  };
  const list = $("facts");
  list.replaceChildren();
  for (const [name, value] of Object.entries(found)) {
    if (value === "" || value === undefined || value === null) continue;
    const pair = element("div");
    pair.append(element("dt", name), element("dd", value));
    list.append(pair);
  }
  const done = (tasks.done + tasks.failed) / (tasks.total || 1);
  $("bar").value = status.state === "done" ? 1 : (status.epoch + done) / (status.epochs || status.epoch + 1);
}

// Without local steps, values would have been exchanged after each of them.
function localSteps(status) {
  if (!(status.local_steps > 1)) return "";
  const traffic = sum(status.pservers, (each) => each.received_bytes) + sum(status.pservers, (each) => each.sent_bytes);
  return `${status.local_steps} in each of ${number(status.batches)} batches, about ${bytes(traffic * (status.local_steps - 1))} not sent`;
}

// Progress of a change to the pservers.
function change(scaling) {
  if (!scaling) return "";
  const drained = scaling.drained.length ? `, without blocks on pserver ${scaling.drained.join(", ")}` : "";
  return `to ${scaling.wanted}${drained}: ${scaling.moved} of ${scaling.total} blocks moved`
    + (scaling.waiting_for ? `; waiting: ${scaling.waiting_for}` : "");
}

function alarms(status) {
  const found = [
    status.error,
    status.checkpoint_alarm && `Checkpoints cannot be completed: ${status.checkpoint_alarm}`,
    status.dataset_alarm && `Files of the dataset: ${status.dataset_alarm}`,
    status.mode_change && `The change of the mode waits for ${status.mode_change}`,
    status.missing_tasks && `${status.missing_tasks} tasks were reported as done but are missing in a pserver; they are repeated.`,
  ].filter(Boolean);
  const list = $("alarms");
  if (list.dataset.shown === found.join("\n")) return;
  list.dataset.shown = found.join("\n");
  list.replaceChildren(...found.map((text) => element("li", text)));
}

// Losses and waits, by their text: since when, and until when if they are over. Shown until a minute later.
const notices = new Map(), SHOWN_S = 60;
const sum = (rows, of) => rows.reduce((total, each) => total + (of(each) ?? 0), 0);

// Who waits for what, for how many seconds.
function waiting(status) {
  const names = Object.fromEntries(status.trainers.map((each) => [each.trainer, called(each)]));
  const found = status.waiting_for && status.state !== "done" ? [["The job", status.waiting_for, 0]] : [];
  for (const each of status.pservers) {
    const whom = each.waits_for.map((name) => names[name] ?? name).join(", ");
    if (whom && each.waits_s > 1) found.push([`Round ${each.waits_at} of ${pserver(each)}`, whom, each.waits_s]);
  }
  for (const each of status.trainers) {
    if (each.waiting_for) found.push([called(each), each.waiting_for, 0]);
    else if (each.starting_s > 5) found.push([called(each), "its script, which has not asked for a batch", each.starting_s]);
  }
  return found.map(([who, cause, waited]) => [who, cause.replace("waiting for ", ""), waited]);
}

function troubles(status, at) {
  const found = new Map(waiting(status).map(([who, cause, waited]) => [`${who} waits for ${cause}`, at - waited]));
  const serves = new Set(status.pservers.filter((each) => each.state === "serving").map((each) => `pserver-${each.index}`));
  for (const [place, each] of events.entries()) {
    if (at - each.at > 600) break;
    if (each.kind === "pserver_gone" && !events.slice(0, place).some((later) => later.kind === "pserver_gone" && later.who === each.who)) {
      const back = events.slice(0, place).findLast((later) => later.who === each.who && later.kind === "pserver_came");
      const text = `${each.who} was lost (${each.text.replace("pserver is gone ", "")}). Batches that no checkpoint contains are repeated`;
      if (!serves.has(each.who) || !back) found.set(text, each.at);
      else notices.set(text, { since: each.at, until: back.at, isLoss: true });
    }
    const isDead = each.kind === "trainer_gone" && /=False tasks_held=[1-9]/.test(each.text);
    if (isDead || ["values_lost", "work_lost", "work_expired", "work_quarantined"].includes(each.kind))
      notices.set(isDead ? `Trainer ${each.who} was lost. Others repeat its tasks` : each.text, { since: each.at, until: each.at, isLoss: true });
  }
  return found;
}

function showNotices(status, at) {
  const found = troubles(status, at);
  for (const [text, since] of found) notices.set(text, { since: Math.min(since, notices.get(text)?.since ?? since) });
  for (const [text, notice] of notices) {
    if (!found.has(text)) notice.until ??= at;
    if (at - notice.until > SHOWN_S) notices.delete(text);
  }
  // Short waits are normal.
  const shown = [...notices].filter(([, { since, until, isLoss }]) => isLoss || (until ?? at) - since > 2);
  $("notices").replaceChildren(...shown.sort(([, one], [, other]) => other.since - one.since).map(([text, { since, until }]) => {
    const more = until === undefined ? ` (for ${seconds(at - since)})` : until > since ? ` (over since ${time(until)})` : "";
    return element("li", `${time(since)} ${text}${more}`, until === undefined ? { class: "now" } : {});
  }));
}

// Part of the run that the curves show, in seconds since 1970; null for the whole run.
let zoom = null;
const UNITS = { progress: " %", "records per second": "/s" };
const FACTORS = { progress: 100 };
const drawn = {};

function svg(name, more) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(more)) made.setAttribute(key, value);
  return made;
}

// A figure with axes. Its points can be read with the pointer, and dragging chooses a part of the run.
function figure(name) {
  const made = { box: element("figure"), caption: element("figcaption"), low: element("span"), high: element("span"),
    line: svg("polyline", {}), mark: svg("line", { class: "mark", y1: -4, y2: 104 }),
    picture: svg("svg", { viewBox: "0 -4 300 108", preserveAspectRatio: "none", role: "img" }),
    range: element("p", "", { "aria-hidden": "true" }), last: element("span"), points: [] };
  for (const y of [0, 50, 100]) made.picture.append(svg("line", { class: "grid", x1: 0, x2: 300, y1: y, y2: y }));
  made.picture.append(made.line, made.mark);
  made.caption.append(element("span", name), made.last);
  const axis = element("div", undefined, { class: "axis", "aria-hidden": "true" });
  axis.append(made.high, made.low);
  const plot = element("div", undefined, { class: "plot" });
  plot.append(axis, made.picture);
  made.box.append(made.caption, plot, made.range);
  const at = (event) => {
    const { left, width } = made.picture.getBoundingClientRect();
    const share = Math.min(1, Math.max(0, (event.clientX - left) / width));
    return made.points[0][0] + share * (made.points.at(-1)[0] - made.points[0][0]);
  };
  let begun = null;
  made.picture.addEventListener("pointerdown", (event) => { begun = at(event); });
  made.picture.addEventListener("pointermove", (event) => { made.pointed = at(event); draw(name); });
  made.picture.addEventListener("pointerleave", () => { made.pointed = begun = null; draw(name); });
  made.picture.addEventListener("pointerup", (event) => {
    const [from, to] = [begun ?? Infinity, at(event)].sort((one, other) => one - other);
    if (made.points.filter(([when]) => when >= from && when <= to).length > 2) showPart([from, to]);
    begun = null;
  });
  return made;
}

function showPart(part) {
  zoom = part;
  const whole = element("button", "Show the whole run", { type: "button" });
  whole.addEventListener("click", () => showPart(null));
  $("zoom").replaceChildren(...(part ? [`The curves show ${time(part[0])} to ${time(part[1])}. `, whole]
    : ["Drag across a curve to enlarge a part of the run."]));
  drawCurves();
}

function draw(name) {
  const made = drawn[name], { points } = made;
  const values = points.map((point) => point[1]);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const [from, to] = [points[0][0], points.at(-1)[0]];
  const x = (when) => ((when - from) / (to - from || 1)) * 300;
  made.line.setAttribute("points", points.map(([when, value]) =>
    `${x(when).toFixed(1)},${(100 - ((value - low) / (high - low || 1)) * 100).toFixed(1)}`).join(" "));
  const near = made.pointed ? points.reduce((best, each) =>
    (Math.abs(each[0] - made.pointed) < Math.abs(best[0] - made.pointed) ? each : best)) : null;
  for (const end of ["x1", "x2"]) made.mark.setAttribute(end, near ? x(near[0]) : -9);
  const shown = (value) => number(value) + (UNITS[name] ?? "");
  made.last.textContent = near ? `${shown(near[1])} at ${time(near[0])}` : shown(values.at(-1));
  [made.low.textContent, made.high.textContent] = [shown(low), shown(high)];
  made.range.replaceChildren(element("span", time(from)), element("span", seconds(to - from)), element("span", time(to)));
  made.picture.setAttribute("aria-label", `${name}: ${number(values.at(-1))} now, from ${number(low)} to ${number(high)} in ${seconds(to - from)}`);
}

function drawCurves() {
  for (const [name, all] of Object.entries(curves)) {
    const factor = FACTORS[name] ?? 1;
    const points = all.filter(([when, value]) => Number.isFinite(value) && (!zoom || (when >= zoom[0] && when <= zoom[1])))
      .map(([when, value]) => [when, factor * value]);
    if (points.length < 2) continue;
    if (!drawn[name]) {
      drawn[name] = figure(name);
      for (const empty of document.querySelectorAll("#curves > .empty")) empty.remove();
      $("curves").append(drawn[name].box);
    }
    drawn[name].points = points;
    draw(name);
  }
}

const pserver = ({ index, process }) => `pserver-${index}` + (process && process !== `pserver-${index}` ? ` (process ${process})` : "");
const called = (trainer) => (trainer.name ? `${trainer.name} (${trainer.trainer})` : trainer.trainer);

// Parts of a loop's time, as reported by the trainer.
const TIMES = { data: "data", script: "script", push: "push", wait: "wait for others", pull: "pull" };

function spent(profile) {
  const total = Object.values(profile).reduce((sum, each) => sum + each, 0);
  return total < 2 ? "" : Object.entries(TIMES).filter(([what]) => profile[what] > 0.005 * total)
    .map(([what, name]) => `${Math.round((100 * profile[what]) / total)} % ${name}`).join(", ");
}

function people(status) {
  table("waits", "Current waits", ["waiting", "for", "duration"],
    waiting(status).map(([who, cause, waited]) => [who, cause, waited ? seconds(waited) : ""]));
  table("trainers", "Trainers and their last reports", ["trainer", "process", "tasks held", "records", "batch", "report", "time", "staleness", "memory"],
    status.trainers.map((each) => [
      called(each), `${each.host} pid ${each.pid}`, each.holding, number(each.records), seconds(each.batch_s),
      seconds(each.silent_s) + " ago", spent(each.profile), each.staleness === null ? "" : number(each.staleness), bytes(each.facts?.memory_bytes),
    ]), (place) => status.trainers[place].silent_s > 12,
    ["", sum(status.trainers, (each) => each.holding), number(sum(status.trainers, (each) => each.records)), "", "", "", "",
      bytes(sum(status.trainers, (each) => each.facts?.memory_bytes))]);
  const servers = [...(status.master ? [{ ...status.master, role: "master" }] : []),
    ...status.pservers.map((each) => ({ ...each, role: pserver(each) }))];
  table("servers", "Servers and their traffic", ["server", "address", "state", "blocks", "buckets", "rows", "bytes", "versions", "received", "sent", "memory"],
    servers.map((each) => [
      each.role, each.address, each.state, each.blocks || "", each.buckets || "",
      each.table_rows ? each.table_rows.toLocaleString("en") : "", bytes(each.size_bytes + each.table_bytes),
      each.blocks || each.buckets ? `${each.lowest_version} to ${each.highest_version}` : "",
      bytes(each.received_bytes), bytes(each.sent_bytes), bytes(each.facts?.memory_bytes),
    ]), (place) => servers[place].state === "not reached",
    ["", "", sum(servers, (each) => each.blocks), sum(servers, (each) => each.buckets) || "",
      number(sum(servers, (each) => each.table_rows)), bytes(sum(servers, (each) => each.size_bytes + each.table_bytes)), "",
      ...["received_bytes", "sent_bytes"].map((name) => bytes(sum(servers, (each) => each[name]))),
      bytes(sum(servers, (each) => each.facts?.memory_bytes))]);
  const missing = status.pservers_desired - status.pservers.length;
  if (missing > 0) $("servers").append(element("p", `${missing} of ${status.pservers_desired} pservers are missing.`));
}

function work(status) {
  table("tables", "Embedding tables", ["table", "rows", "memory", "waiting", "read", "hits", "created", "evicted", "rejected for lack of memory"],
    status.tables.map((each) => [
      each.name, number(each.rows), bytes(each.size_bytes), number(each.waiting), number(each.reads),
      each.reads ? Math.round((100 * each.hits) / each.reads) + " %" : "", number(each.created), number(each.evicted),
      each.refused ? number(each.refused) : "",
    ]), (place) => status.tables[place].refused > 0,
    [number(sum(status.tables, (each) => each.rows)), bytes(sum(status.tables, (each) => each.size_bytes)),
      ...["waiting", "reads"].map((name) => number(sum(status.tables, (each) => each[name]))), "",
      ...["created", "evicted", "refused"].map((name) => number(sum(status.tables, (each) => each[name])))]);
  table("running", "Longest running tasks", ["trainer", "epoch", "task", "file", "running for", "earlier failures"],
    status.running.map((each) => [
      each.trainer, each.epoch + 1, each.task, each.url, seconds(each.running_s), each.failures || "",
    ]));
  table("failed", "Quarantined batches", ["file", "records", "epoch", "task", "attempts", "error"],
    status.failed.map((each) => [
      each.url, `${each.first_record} to ${each.first_record + each.records - 1}`, each.epoch + 1, each.task,
      each.attempts, each.error,
    ]), () => true);
}

function showEvents(news) {
  if (!news.events.length) return;
  if (news.events[0].number === 1) events = [];
  events = [...news.events.reverse(), ...events].slice(0, 200);
  table("events", "Newest first", ["time", "kind", "event"], events.map((each) => [
    time(each.at), each.kind.replaceAll("_", " "), each.text,
  ]), (place) => events[place].is_warning);
}

function show(news) {
  const status = news.status;
  document.title = `${status.job}: ${status.state}`;
  $("job").textContent = status.job;
  const text = status.waiting_for ? `${status.state}: waiting for ${status.waiting_for.replace("waiting for ", "")}` : status.state;
  if ($("state").textContent !== text) $("state").textContent = text;
  $("state").classList.remove("lost");
  if (Object.keys(news.curves).length) {
    curves = news.curves;
    drawCurves();
  }
  facts(status);
  alarms(status);
  people(status);
  work(status);
  showEvents(news);
  showNotices(status, news.at);
}

const source = new EventSource("stream");
source.onmessage = (message) => show(JSON.parse(message.data));
source.onerror = () => {
  $("state").textContent = "The master does not answer; retrying.";
  $("state").classList.add("lost");
};
