// Requests to the engine that serves this page. The key is in a variable of this script, and nowhere else: other pages
// of the server, such as /docs, which loads scripts from elsewhere, share whatever a browser stores for its address.

const LONGEST_MS = 5000;

let key = null;

export const hasKey = () => key !== null;
export const use = (given) => {
  key = given;
};

/** An answer that is not the data. `status` is 0 if there was no answer. */
export class Failure extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The answer to `GET /v1/rl_memory/` and `route`. Raises a `Failure`. */
export async function get(route) {
  let response;
  let text;
  try {
    const signal = AbortSignal.timeout(LONGEST_MS);
    response = await fetch(route, { headers: headers(), signal, cache: "no-store", redirect: "error" });
    text = await response.text();
  } catch (error) {
    throw new Failure(0, error.name === "TimeoutError" ? `no answer in ${LONGEST_MS / 1000} s` : "no connection");
  }
  let answer = null;
  try {
    answer = JSON.parse(text);
  } catch {
    // a proxy's page, say
  }
  if (response.ok && answer !== null) return answer;
  const message = answer?.error?.message ?? answer?.error ?? "it is not an answer of this package";
  throw new Failure(response.ok ? 502 : response.status, String(message));
}

function headers() {
  if (key === null) return {};
  // The bytes of the key, as other clients send them: a header of a browser holds no other characters than these 256.
  return { Authorization: `Bearer ${String.fromCharCode(...new TextEncoder().encode(key))}` };
}
