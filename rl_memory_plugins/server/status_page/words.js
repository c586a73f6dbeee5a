// What states and errors mean, and what to do.

export const REASONS = {
  starting: "The server is starting.",
  asleep: "Wake it up.",
  stale: "The weights are stale. Send a complete update.",
  updating: "The weights are being updated.",
  failed: "An update of the weights broke off. Send a complete one.",
  paused: "The engine is paused. Wake it up.",
};

export const CONTENTS = {
  valid: "may answer requests",
  stale: "discarded or withheld; a complete update makes them valid",
  updating: "an update has written its first byte",
  failed: "an update broke off",
};

export const TAG_STATES = {
  resident: "on the device",
  preserved: "in host memory",
  discarded: "discarded",
};

/** Of the errors with which a transition can end, by their types. */
export const REMEDIES = {
  RLMemoryError: "Read the message and the log of the server.",
  InvalidRequestError: "Correct the parameter that the message names. Nothing happened.",
  ManifestError: "Make the trainer's tensors fit the model: the message names those that do not. No weight was changed.",
  StateConflictError: "Make the call that the message names first. Nothing happened.",
  OutOfMemoryError: "Free memory on the device or the host, then repeat the call.",
  DeviceMemoryError: "Free memory on the device, e.g. end or shrink the trainer, then repeat the call. Nothing was changed.",
  HostMemoryError: "Free host memory, or sleep at level 2, which keeps no copy of the weights. Nothing was changed.",
  WeightUpdateError: "Mend the cause that the message names, then send a complete update: it opens the engine again.",
  DrainTimeoutError: "Repeat the call, or use mode abort, which ends running requests. Nothing was released.",
  UnsupportedError: "This engine cannot do it: the message says why, and what can be done in its place.",
  EngineFaultError: "Read the log of the server. Call wake_up: it asks the ranks for their state again.",
};
