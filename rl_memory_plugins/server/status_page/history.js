// Memory by owner over time. A span of time in which nothing changed is one entry.

const LONGEST_MS = 6 * 3600 * 1000;
const MOST = 20000;

/**
 * Entries are `{from, to, values}`: times in milliseconds, and bytes by owner. Between two moments that follow each other
 * the values of the former hold. Where the engine did not answer there is no entry.
 */
export class History {
  entries = [];
  #follows = false; // whether the next moment follows the last one

  add(time, values) {
    const last = this.entries.at(-1);
    const at = Math.max(time, last?.to ?? time); // transitions of two engines may overlap
    if (last !== undefined && this.#follows) last.to = at;
    if (last === undefined || !this.#follows || !equal(last.values, values)) {
      this.entries.push({ from: at, to: at, values });
    }
    this.#follows = true;
    const first = this.entries.findIndex((entry) => entry.to > at - LONGEST_MS);
    this.entries.splice(0, Math.max(first, this.entries.length - MOST));
  }

  interrupt() {
    this.#follows = false;
  }
}

function equal(a, b) {
  const names = Object.keys(a);
  return names.length === Object.keys(b).length && names.every((name) => a[name] === b[name]);
}
