// What the page asks the server for.

const AGAIN = 30; // times that a busy server is asked again

export class Failure extends Error {
  constructor(message, status = 0, candidates = []) {
    super(message);
    this.status = status;
    this.candidates = candidates;
  }
}

async function once(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("The server does not answer. Is dave serve still running?");
  }
}

// busy: called with what a busy server says, before it is asked again
async function get(path, { busy, ...options } = {}) {
  for (let left = AGAIN; ; left--) {
    const response = await once(path, options);
    if (response.ok) return response;
    const told = await response.json().catch(() => ({}));
    const said = sentence(told.error || `The server answered with ${response.status}`);
    if (response.status !== 503 || !left) throw new Failure(said, response.status, told.candidates);
    busy?.(said);
    await pause(Number(response.headers.get("Retry-After")) || 2, options.signal);
  }
}

function pause(seconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, 1000 * seconds);
    signal?.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    });
  });
}

// Names of files, which come before a colon, stay as they are.
function sentence(text) {
  return text.replace(/^[a-z](?=[a-z]* )/, (letter) => letter.toUpperCase()) + (/[.?!]$/.test(text) ? "" : ".");
}

function address(path, options) {
  const given = Object.entries(options).filter(([, value]) => value !== undefined && value !== "");
  return `${path}?${new URLSearchParams(given.flatMap(([key, value]) => [value].flat().map((one) => [key, one])))}`;
}

export async function info() {
  return (await get("/api/info")).json();
}

export async function classes(model, search) {
  return (await get(address("/api/classes", { model, search }))).json();
}

export async function verdict(model) {
  return (await get(address("/api/verdict", { model }))).json();
}

export async function refusals(model) {
  return (await get(address("/api/refusals", { model }))).json();
}

export async function example(path) {
  return (await get(path)).blob();
}

export async function look(blob, options, signal, busy) {
  return (await get(address("/api/look", options), { method: "POST", body: blob, signal, busy })).json();
}

export async function ask(blob, options, signal, busy) {
  return (await get(address("/api/ask", options), { method: "POST", body: blob, signal, busy })).json();
}

// The events of a run, one after the other; leaving the loop or aborting ends the work on the server.
export async function* explain(blob, options, signal, busy) {
  const response = await get(address("/api/explain", options), { method: "POST", body: blob, signal, busy });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const events = (text + value).split("\n\n");
      text = events.pop();
      for (const event of events) {
        const [name, data] = event.split("\n").map((line) => line.slice(line.indexOf(":") + 2));
        const told = JSON.parse(data);
        if (name === "failed") throw new Failure(sentence(told.error), 0, told.candidates);
        yield [name, told];
      }
    }
  } catch (error) {
    if (error instanceof TypeError) throw new Failure("The connection to the server broke off.");
    throw error;
  } finally {
    reader.cancel().catch(() => {});
  }
}

function bytes(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}

// Numbers of a plane, and the one shown in the brightest colour.
export function plane({ data, unit, limit, caption }) {
  const view = new DataView(bytes(data).buffer);
  const values = Float32Array.from({ length: view.byteLength / 2 }, (_, at) => view.getInt16(2 * at, true) * unit);
  return { values, limit, caption };
}

// The pixels of a PNG in base64.
export async function pixels(text) {
  const bitmap = await createImageBitmap(new Blob([bytes(text)], { type: "image/png" }));
  const canvas = document.createElement("canvas");
  canvas.width = bitmap.width;
  canvas.height = bitmap.height;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.drawImage(bitmap, 0, 0);
  return context.getImageData(0, 0, bitmap.width, bitmap.height);
}
