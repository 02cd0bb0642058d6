// Requests to the server.

const RETRIES = 30; // of a request that a busy server rejects

export class Failure extends Error {
  constructor(message, status = 0, candidates = []) {
    super(message);
    this.status = status;
    this.candidates = candidates;
  }
}

async function fetchOnce(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("The server does not answer. Is dave serve still running?");
  }
}

// onBusy: called with the message of a busy server, before the request is sent again
async function send(path, { onBusy, ...options } = {}) {
  for (let left = RETRIES; ; left--) {
    const response = await fetchOnce(path, options);
    if (response.ok) return response;
    const failure = await response.json().catch(() => ({}));
    const message = sentence(failure.error || `The server answered with ${response.status}`);
    if (response.status !== 503 || !left) throw new Failure(message, response.status, failure.candidates);
    onBusy?.(message);
    await wait(Number(response.headers.get("Retry-After")) || 2, options.signal);
  }
}

function wait(seconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, 1000 * seconds);
    signal?.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    });
  });
}

// File names, which come before a colon, keep their first letter.
function sentence(text) {
  return text.replace(/^[a-z](?=[a-z]* )/, (letter) => letter.toUpperCase()) + (/[.?!]$/.test(text) ? "" : ".");
}

function address(path, options) {
  const entries = Object.entries(options).filter(([, value]) => value !== undefined && value !== "");
  return `${path}?${new URLSearchParams(entries.flatMap(([key, value]) => [value].flat().map((one) => [key, one])))}`;
}

export async function info() {
  return (await send("/api/info")).json();
}

export async function classes(model, search) {
  return (await send(address("/api/classes", { model, search }))).json();
}

export async function verdict(model) {
  return (await send(address("/api/verdict", { model }))).json();
}

export async function refusals(model) {
  return (await send(address("/api/refusals", { model }))).json();
}

export async function example(path) {
  return (await send(path)).blob();
}

export async function classify(blob, options, signal, onBusy) {
  return (await send(address("/api/classify", options), { method: "POST", body: blob, signal, onBusy })).json();
}

export async function generate(blob, options, signal, onBusy) {
  return (await send(address("/api/generate", options), { method: "POST", body: blob, signal, onBusy })).json();
}

export async function sources(blob, options, signal) {
  return (await send(address("/api/sources", options), { method: "POST", body: blob, signal })).json();
}

// Yields the events of an explanation; leaving the loop or aborting stops the work on the server.
export async function* explain(blob, options, signal, onBusy) {
  const response = await send(address("/api/explain", options), { method: "POST", body: blob, signal, onBusy });
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
        const content = JSON.parse(data);
        if (name === "failed") throw new Failure(sentence(content.error), 0, content.candidates);
        yield [name, content];
      }
    }
  } catch (error) {
    if (error instanceof TypeError) throw new Failure("The connection to the server was lost.");
    throw error;
  } finally {
    reader.cancel().catch(() => {});
  }
}

function decodeBase64(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}

// Decodes one number per pixel, and the number shown in the brightest colour.
export function decodePlane({ data, unit, limit, caption }) {
  const view = new DataView(decodeBase64(data).buffer);
  const values = Float32Array.from({ length: view.byteLength / 2 }, (_, at) => view.getInt16(2 * at, true) * unit);
  return { values, limit, caption };
}

// Decodes the pixels of a PNG in base64.
export async function decodePixels(text) {
  const bitmap = await createImageBitmap(new Blob([decodeBase64(text)], { type: "image/png" }));
  return drawPart(bitmap, [0, 0, 1, 1], bitmap);
}

// Decodes the part of a photograph that a model sees, in its own resolution; null where that is no finer.
// crop: left, top, right and bottom in parts of the whole; picture: the part as the model sees it; longest: limit on
// the sides in pixels
export async function cropPhoto(blob, crop, { width, height }, longest) {
  const bitmap = await createImageBitmap(blob);
  const finest = Math.max(((crop[2] - crop[0]) * bitmap.width) / width, ((crop[3] - crop[1]) * bitmap.height) / height);
  const factor = Math.min(finest, longest / Math.max(width, height));
  if (factor <= 1) return null;
  return drawPart(bitmap, crop, { width: Math.round(width * factor), height: Math.round(height * factor) });
}

function drawPart(bitmap, [left, top, right, bottom], { width, height }) {
  const canvas = Object.assign(document.createElement("canvas"), { width, height });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.fillStyle = "#808080"; // outside of the photograph, where it is padded
  context.fillRect(0, 0, width, height);
  const [wide, high] = [width / (right - left), height / (bottom - top)];
  context.drawImage(bitmap, -left * wide, -top * high, wide, high);
  return context.getImageData(0, 0, width, height);
}
