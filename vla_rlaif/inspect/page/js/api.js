// Questions to the server. A problem of the files that are looked at is an answer with a text; no answer is a banner.

const TIMEOUT_MS = 30000;

export class Problem extends Error {}
export class Away extends Error {}

/** JSON of api/NAME. Throws Problem with the server's words, or Away. */
export async function ask(name, query = {}, { signal } = {}) {
  const deadline = AbortSignal.timeout(TIMEOUT_MS);
  let response;
  try {
    response = await fetch(address(`api/${name}`, query), { signal: signal ? AbortSignal.any([signal, deadline]) : deadline });
  } catch (error) {
    if (signal && signal.aborted) throw error;
    throw new Away("No answer from the server.");
  }
  if (!response.ok) throw new Problem(await response.text());
  const said = await response.json();
  if (said.problem) throw new Problem(said.problem);
  return said;
}

export function address(path, query = {}) {
  const known = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const text = new URLSearchParams(known).toString();
  return text ? `${path}?${text}` : path;
}

/** The part of the address behind "#": what is looked at. */
export function link(...parts) {
  return `#/${parts.map(encodeURIComponent).join("/")}`;
}
