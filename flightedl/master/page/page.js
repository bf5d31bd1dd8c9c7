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

function table(where, caption, titles, rows, bad = () => false) {
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

function curve(name, points) {
  const [width, height] = [300, 100];
  const values = points.map((point) => point[1]).filter(Number.isFinite);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const [from, to] = [points[0][0], points[points.length - 1][0]];
  const at = ([time, value]) =>
    `${(((time - from) / (to - from || 1)) * width).toFixed(1)},${(height - ((value - low) / (high - low || 1)) * height).toFixed(1)}`;
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const last = number(values[values.length - 1]);
  const range = `from ${number(low)} to ${number(high)} in the last ${seconds(to - from)}`;
  for (const [key, value] of Object.entries({
    viewBox: `0 -4 ${width} ${height + 8}`, preserveAspectRatio: "none", role: "img", "aria-label": `${name}: ${last} now, ${range}`,
  })) svg.setAttribute(key, value);
  const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  line.setAttribute("points", points.filter((point) => Number.isFinite(point[1])).map(at).join(" "));
  svg.append(line);
  const caption = element("figcaption");
  caption.append(element("span", name), element("span", last));
  const figure = element("figure");
  figure.append(caption, svg, element("p", range, { "aria-hidden": "true" }));
  return figure;
}

function drawCurves() {
  const known = Object.entries(curves).filter(([, points]) => points.length > 1);
  if (known.length) $("curves").replaceChildren(...known.map(([name, points]) => curve(name, points)));
}

const called = (trainer) => (trainer.name ? `${trainer.name} (${trainer.trainer})` : trainer.trainer);

// Parts of a loop's time, as reported by the trainer.
const TIMES = { data: "data", script: "script", push: "push", wait: "wait for others", pull: "pull" };

function spent(profile) {
  const total = Object.values(profile).reduce((sum, each) => sum + each, 0);
  return total < 2 ? "" : Object.entries(TIMES).filter(([what]) => profile[what] > 0.005 * total)
    .map(([what, name]) => `${Math.round((100 * profile[what]) / total)} % ${name}`).join(", ");
}

function people(status) {
  const names = Object.fromEntries(status.trainers.map((each) => [each.trainer, called(each)]));
  const waits = [];
  if (status.waiting_for) waits.push(["job", status.waiting_for, ""]);
  for (const each of status.pservers) {
    if (each.waits_for.length && each.waits_s > 1) {
      const whom = each.waits_for.map((name) => names[name] ?? name).join(", ");
      waits.push([`round ${each.waits_at} of pserver-${each.index}`, whom, seconds(each.waits_s)]);
    }
  }
  for (const each of status.trainers) if (each.waiting_for) waits.push([called(each), each.waiting_for, ""]);
  table("waits", "Current waits", ["waiting", "for", "duration"], waits);
  table("trainers", "Trainers and their last reports", ["trainer", "process", "tasks held", "records", "batch", "report", "time", "staleness", "memory"],
    status.trainers.map((each) => [
      called(each), `${each.host} pid ${each.pid}`, each.holding, number(each.records), seconds(each.batch_s),
      seconds(each.silent_s) + " ago", spent(each.profile), each.staleness === null ? "" : number(each.staleness), bytes(each.facts?.memory_bytes),
    ]), (place) => status.trainers[place].silent_s > 12);
  const servers = [...(status.master ? [{ ...status.master, role: "master" }] : []),
    ...status.pservers.map((each) => ({ ...each, role: `pserver-${each.index}` }))];
  table("servers", "Servers and their traffic", ["server", "address", "state", "blocks", "buckets", "values", "versions", "received", "sent", "memory"],
    servers.map((each) => [
      each.role, each.address, each.state, each.blocks || "", each.buckets || "", bytes(each.size_bytes),
      each.blocks || each.buckets ? `${each.lowest_version} to ${each.highest_version}` : "",
      bytes(each.received_bytes), bytes(each.sent_bytes), bytes(each.facts?.memory_bytes),
    ]), (place) => servers[place].state === "not reached");
  const missing = status.pservers_desired - status.pservers.length;
  if (missing > 0) $("servers").append(element("p", `${missing} of ${status.pservers_desired} pservers are missing.`));
}

function work(status) {
  table("tables", "Embedding tables", ["table", "rows", "memory", "waiting", "read", "hits", "created", "evicted", "rejected for lack of memory"],
    status.tables.map((each) => [
      each.name, number(each.rows), bytes(each.size_bytes), number(each.waiting), number(each.reads),
      each.reads ? Math.round((100 * each.hits) / each.reads) + " %" : "", number(each.created), number(each.evicted),
      each.refused ? number(each.refused) : "",
    ]), (place) => status.tables[place].refused > 0);
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
}

const source = new EventSource("stream");
source.onmessage = (message) => show(JSON.parse(message.data));
source.onerror = () => {
  $("state").textContent = "The master does not answer; retrying.";
  $("state").classList.add("lost");
};
