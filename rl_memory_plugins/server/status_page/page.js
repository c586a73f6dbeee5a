// Asks the engine again and again, one question at a time, and shows the answers.

import { Chart } from "./chart.js";
import * as engine from "./engine.js";
import { DEVICE_OWNERS, HOST_OWNERS } from "./owners.js";
import { Past } from "./past.js";
import { age, time } from "./text.js";
import { showLeft, showSoftware, showState, showTags, showTransitions, showVersions } from "./view.js";

const PAUSE_MS = 1500;

const part = (id) => document.getElementById(id);
const past = new Past();
const charts = [
  [new Chart(part("device-chart"), "On the devices", DEVICE_OWNERS), past.devices],
  [new Chart(part("host-chart"), "In host memory", HOST_OWNERS), past.hosts],
];
let answered = null; // when the last answer came, by the browser's clock
let installation = null; // of the server that answered last
let asking = false;
let timer = 0;

async function ask() {
  if (asking) return; // the next question comes soon
  clearTimeout(timer);
  asking = true;
  try {
    const [memory, timeline] = await Promise.all([engine.get("memory"), engine.get(`timeline?since=${past.since}`)]);
    installation ??= await engine.get("installation");
    answered = Date.now();
    past.add(timeline, memory);
    showAnswer(memory);
  } catch (failure) {
    past.interrupt();
    installation = null; // another version may answer next
    showFailure(failure);
  } finally {
    asking = false;
    timer = setTimeout(ask, PAUSE_MS);
  }
}

function showAnswer(memory) {
  part("data").hidden = false;
  part("data").classList.remove("old");
  say("");
  part("key-form").hidden = true;
  part("forget-key").hidden = !engine.hasKey();
  part("connection").textContent = `The engine answered at ${time(answered)}.`;
  showState(memory);
  showTags(memory);
  showLeft(memory);
  showTransitions(past);
  showVersions(past, memory);
  showSoftware(installation);
  drawCharts();
}

function drawCharts() {
  const now = past.now + (part("data").classList.contains("old") ? Date.now() - answered : 0);
  for (const [chart, history] of charts) chart.draw(history.entries, now, Number(part("window").value) * 1000);
}

function showFailure(failure) {
  const needsKey = failure.status === 401;
  say(`${what(failure)} ${needsKey ? "" : lastAnswer()}`);
  part("connection").textContent = answered === null ? "" : `Last answer ${age(Date.now() - answered)} ago.`;
  part("key-form").hidden = !needsKey;
  part("data").hidden = answered === null || needsKey;
  part("data").classList.add("old");
  if (!part("data").hidden) drawCharts();
}

function what(failure) {
  if (!(failure instanceof engine.Failure)) return `The page cannot show the engine's answer: ${failure}.`;
  if (failure.status === 401) return engine.hasKey() ? `The engine does not accept this key: ${failure.message}.` : "";
  if (failure.status === 0) return `The engine does not answer: ${failure.message}.`;
  return `The engine answers with an error (${failure.status}): ${failure.message}.`;
}

function lastAnswer() {
  return answered === null ? "It has not answered yet."
    : `The last answer came at ${time(answered)}. The page shows what was true then.`;
}

/** Screen readers read an alert whenever it is set. */
function say(text) {
  part("problem").hidden = text.trim() === "";
  if (part("problem").textContent !== text) part("problem").textContent = text;
}

part("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  engine.use(part("key").value);
  part("key").value = "";
  ask();
});
part("forget-key").addEventListener("click", () => location.reload()); // neither the key nor what it has shown stays
part("window").addEventListener("change", drawCharts);
ask();
