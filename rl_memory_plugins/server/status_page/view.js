// The parts of the page that are texts and tables.

import { element, lines, pairs, show, table } from "./dom.js";
import { endOf } from "./past.js";
import { bytes, nameOf, placeOf, seconds, time } from "./text.js";
import { CONTENTS, REASONS, REMEDIES, TAG_STATES } from "./words.js";

const part = (id) => document.getElementById(id);

export function showState(memory) {
  const under = memory.engines.filter((engine) => engine.busy).map((engine) => `${engine.busy} (engine ${engine.engine_rank})`);
  const ranks = memory.engines.flatMap((engine) => engine.ranks);
  const pauses = [
    memory.engines.some((engine) => engine.paused) && "paused",
    memory.engines.some((engine) => engine.idle) && "idle: no request came",
  ].filter(Boolean);
  const requests = memory.admitting
    ? ["Requests", lines("admitted"), "good"]
    : ["Requests", lines(`refused: ${memory.reason}`, under.length ? "" : REASONS[memory.reason] ?? ""), "bad"];
  const spoken = `Requests ${memory.admitting ? "admitted" : `refused: ${memory.reason}`}. Weights ${memory.content}.`;
  if (part("announced").textContent !== spoken) part("announced").textContent = spoken;
  const content = lines(memory.content, CONTENTS[memory.content] ?? "");
  const data = [memory.admitting, memory.reason, memory.content, memory.weight_version, under, pauses, ranks.length,
    memory.engines.length];
  show(part("state"), data, () => pairs([
    requests,
    ["Content of the weights", content, memory.content === "valid" ? "good" : "bad"],
    ["Weight version", memory.weight_version],
    ["Under way", under.join(", ") || "nothing"],
    ["Pauses", pauses.join(", ") || "none"],
    ["Engines", `${memory.engines.length} with ${ranks.length} ${ranks.length === 1 ? "rank" : "ranks"}`],
  ]));
}

export function showTags(memory) {
  const places = memory.engines.flatMap((engine) => engine.ranks.map((rank) => [placeOf(engine, rank), rank]));
  const names = [...new Set(places.flatMap(([, rank]) => Object.keys(rank.tags)))];
  const data = places.map(([place, rank]) => [place, rank.tags, rank.content, rank.device, rank.device_free_bytes]);
  show(part("tags"), data, () => table(
    ["Rank", "Device", ...names.map(nameOf), "Content", "Free at the last transition"],
    places.map(([place, rank]) => [
      place,
      rank.device,
      ...names.map((name) => tagCell(rank.tags[name])),
      rank.content,
      `${bytes(rank.device_free_bytes)} of ${bytes(rank.device_total_bytes)}`,
    ]),
  ));
}

function tagCell(tag) {
  if (tag === undefined) return "–";
  const state = element("span", { class: `tag ${TAG_STATES[tag.state] ? tag.state : ""}` }, tag.state);
  const copy = tag.host_bytes ? `copy of ${bytes(tag.host_bytes)} in host memory` : "";
  return lines(state, bytes(tag.bytes), copy);
}

export function showLeft(memory) {
  const places = memory.engines.flatMap((engine) => engine.ranks.map((rank) => [placeOf(engine, rank), rank.left]));
  const causes = [...new Set(places.flatMap(([, left]) => Object.keys(left)))].sort();
  const none = memory.is_sleeping ? "Nothing was measured: the engine has no GPU, or the sleep is a moment old."
    : "Nothing sleeps. What is left is measured during a sleep.";
  part("no-left").textContent = causes.length ? "" : none;
  part("left").parentNode.hidden = !causes.length;
  show(part("left"), places, () => table(
    ["Rank", ...causes, "Sum"],
    places.map(([place, left]) => [
      place,
      ...causes.map((cause) => (cause in left ? bytes(left[cause]) : "–")),
      bytes(Object.values(left).reduce((total, one) => total + one, 0)),
    ]),
  ));
}

export function showTransitions(past) {
  const none = past.transitions.length ? "" : "None has ended since the server started.";
  part("no-transitions").textContent = past.dropped ? `Not all of ${past.dropped} earlier calls are kept.` : none;
  part("transitions").parentNode.hidden = !past.transitions.length;
  const data = past.transitions.map((event) => [event.timeline, event.seq]);
  show(part("transitions"), data, () => table(
    ["Ended", "Operation", "Outcome", "Duration", "Steps", "Weights afterwards"],
    past.transitions.map((event) => [
      time(endOf(event)),
      lines(event.operation, ...argumentsOf(event)),
      outcomeOf(event),
      seconds(event.duration_ns / 1e9),
      lines(...stepsOf(event)),
      event.weight_version === null ? "unknown" : lines(event.weight_version, event.content),
    ]),
  ));
}

/** Each step on all ranks: how long after the start of the transition the first rank began and the last one ended. */
function stepsOf(event) {
  const steps = new Map();
  for (const { name, start_ns: start, duration_ns: duration } of event.steps) {
    const [first, last] = steps.get(name) ?? [Infinity, -Infinity];
    steps.set(name, [Math.min(first, start), Math.max(last, start + duration)]);
  }
  const since = (at) => ((at - event.start_ns) / 1e9).toFixed(3);
  return [...steps].map(([name, [first, last]]) => `${name} ${since(first)} to ${since(last)} s`);
}

function argumentsOf(event) {
  return [
    event.count > 1 ? `${event.count} calls` : "",
    event.level === null ? "" : `level ${event.level}`,
    event.tags === null ? "" : event.tags.map(nameOf).join(", "),
    event.mode === null ? "" : `mode ${event.mode}`,
    event.idle ? "because no request came" : "",
    event.received_bytes ? `${bytes(event.received_bytes)} by ${event.transports.join(", ")}` : "",
  ];
}

function outcomeOf(event) {
  if (event.outcome !== "failed") return lines(element("span", { class: "tag good" }, event.outcome));
  return lines(
    element("span", { class: "tag bad" }, event.outcome),
    element("b", {}, event.error ?? ""),
    event.message ?? "",
    element("i", {}, REMEDIES[event.error] ?? ""),
  );
}

export function showVersions(past, memory) {
  const adapters = memory.engines.flatMap((engine) => engine.adapters.map((adapter) => [engine.engine_rank, adapter]));
  const rows = past.versions.map(({ version, at }, index) => [
    version, "weights", index === 0 ? "loaded" : "replaced", at === null ? "before all that the timeline holds" : time(at)]);
  const loaded = adapters.map(([engine, adapter]) => [
    adapter.version, `adapter ${adapter.name}`, `loaded by engine ${engine}, ${bytes(adapter.bytes)}`, "–"]);
  const all = [...loaded, ...rows];
  show(part("versions"), all, () => table(["Version", "Of", "State", "Loaded at"], all));
}

export function showSoftware(installation) {
  show(part("software"), installation, () => pairs([
    ["rl_memory_plugins", installation.version],
    ...Object.entries(installation.versions),
    ["Python", installation.python],
    ["Weight stream", `protocol ${installation.protocol}`],
    ["Host", installation.host],
    ["Process", installation.pid],
  ]));
}
