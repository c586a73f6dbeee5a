// Whose the memory is: sums over all ranks of all engines, in bytes.

export const DEVICE_OWNERS = ["weights", "kv_cache", "cuda_graph", "left"];
export const HOST_OWNERS = ["arena", "shared"];

const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);

/** On the devices: the tags, and what is left beside them while something sleeps. `ranks` are those of a timeline. */
export function onDevices(ranks) {
  const owned = Object.fromEntries(DEVICE_OWNERS.map((owner) => [owner, 0]));
  for (const rank of ranks) {
    for (const [tag, size] of Object.entries(rank.tags)) owned[tag] = (owned[tag] ?? 0) + size;
    owned.left += sum(Object.values(rank.left));
  }
  return owned;
}

/** In host memory: the copies of each rank alone, and copies that ranks share, each counted once. */
export function onHosts(memory) {
  const ranks = memory.engines.flatMap((engine) => engine.ranks);
  const shared = Object.assign({}, ...ranks.map((rank) => rank.host_shared));
  return { arena: sum(ranks.map((rank) => rank.host_arena_bytes)), shared: sum(Object.values(shared)) };
}
