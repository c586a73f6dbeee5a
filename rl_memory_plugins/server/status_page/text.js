// Numbers and names as a person reads them.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** The power of 1024 whose unit shows this number of bytes best. */
export function unitOf(bytes) {
  return bytes < 1 ? 0 : Math.min(Math.floor(Math.log2(bytes) / 10), UNITS.length - 1);
}

export function bytes(count, power = unitOf(count)) {
  const value = count / 1024 ** power;
  const digits = power === 0 || value >= 100 || Number.isInteger(value) ? 0 : value >= 10 ? 1 : 2;
  return `${value.toFixed(digits)} ${UNITS[power]}`;
}

export function seconds(value) {
  if (value < 0.0000995) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 0.0995) return `${(value * 1000).toFixed(value < 0.00995 ? 2 : 1)} ms`;
  return value < 99.5 ? `${value.toFixed(2)} s` : `${value.toFixed(0)} s`;
}

/** How long ago. */
export function age(milliseconds) {
  const whole = Math.max(0, Math.round(milliseconds / 1000));
  if (whole < 90) return `${whole} s`;
  return whole < 5400 ? `${Math.round(whole / 60)} min` : `${(whole / 3600).toFixed(1)} h`;
}

/** The time of day, for milliseconds since 1970; with the date if it is not of today. */
export function time(milliseconds) {
  const date = new Date(milliseconds);
  const clock = date.toTimeString().slice(0, 8);
  return date.toDateString() === new Date().toDateString() ? clock : `${date.toLocaleDateString()} ${clock}`;
}

const NAMES = {
  weights: "Weights",
  kv_cache: "KV cache",
  cuda_graph: "CUDA graphs",
  left: "Left besides",
  arena: "Copies",
  shared: "Shared copies",
};

/** The name of a tag or an owner of memory. */
export const nameOf = (owner) => NAMES[owner] ?? owner;

export const placeOf = (engine, rank) => `engine ${engine.engine_rank}, rank ${rank.rank}`;
