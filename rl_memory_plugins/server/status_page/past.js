// What the page knows of the past: transitions that have ended, memory by owner, and weight versions.

import { History } from "./history.js";
import { onDevices, onHosts } from "./owners.js";

const MOST = 200;

const milliseconds = (nanoseconds) => nanoseconds / 1e6;
export const endOf = (event) => milliseconds(event.start_ns + event.duration_ns);

/** All times are milliseconds since 1970 by the clock of the engine's host. */
export class Past {
  devices = new History();
  hosts = new History();
  transitions = []; // the latest first
  dropped = 0; // calls up to the last one whose event the engine's timeline did not hold any more
  versions = []; // {version, at}, the latest first; `at` is null for one that was there before all that is known
  now = 0;
  #next = new Map(); // by the name of a timeline: a server that starts again, or another one of the engine, has its own
  #timeline = null;

  /** The number of the last transition that is known of the timeline that answered last. */
  get since() {
    return this.#next.get(this.#timeline) ?? 0;
  }

  /** Take an answer to `GET /timeline?since=…` and one to `GET /memory`. */
  add(timeline, memory) {
    const asked = this.#timeline === timeline.timeline || this.since === 0;
    this.#timeline = timeline.timeline;
    if (asked) { // otherwise the number was that of another timeline, and the next question has the right one
      for (const event of timeline.events) this.#addTransition({ ...event, timeline: timeline.timeline });
      this.#next.set(timeline.timeline, timeline.next);
      this.dropped += timeline.dropped;
    }
    this.now = milliseconds(timeline.clock.now_ns);
    if (timeline.present !== null) {
      this.devices.add(this.now, onDevices(timeline.present.memory));
      this.#addVersion(timeline.present.weight_version, this.now);
    }
    this.hosts.add(this.now, onHosts(memory));
  }

  interrupt() {
    this.devices.interrupt();
    this.hosts.interrupt();
  }

  #addTransition(event) {
    const stays = (other) => other.timeline !== event.timeline || other.first_seq !== event.first_seq;
    const others = this.transitions.filter(stays); // the event of another call that was refused alike goes
    const isNew = others.length === this.transitions.length;
    this.transitions = [event, ...others].sort((a, b) => endOf(b) - endOf(a)).slice(0, MOST);
    if (isNew && event.before.length) this.devices.add(milliseconds(event.start_ns), onDevices(event.before));
    if (event.after.length) this.devices.add(endOf(event), onDevices(event.after));
    this.#addVersion(event.weight_version, endOf(event), event.operation === "update_weights" && event.error === null);
  }

  /** `brought`: whether the version is certainly no older than `at`. */
  #addVersion(version, at, brought = false) {
    const last = this.versions[0];
    if (version === null || last?.version === version) return; // null: nobody knew it
    const known = brought || last !== undefined;
    this.versions = [{ version, at: known ? at : null }, ...this.versions].slice(0, MOST);
  }
}
