// Images of this browser, by the name under which they stand in the address: a reload finds them again.

const KEPT = 24;

function asked(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

async function images(mode) {
  const opening = indexedDB.open("dave", 1);
  opening.onupgradeneeded = () => opening.result.createObjectStore("images", { keyPath: "id" });
  return (await asked(opening)).transaction("images", mode).objectStore("images");
}

// Names rise with time, so that the oldest come first.
export function newName() {
  return Date.now().toString(36) + Math.random().toString(36).slice(2, 6);
}

export async function keep(id, blob, name) {
  try {
    const all = await images("readwrite");
    all.put({ id, blob, name });
    const ids = await asked(all.getAllKeys());
    ids.slice(0, Math.max(0, ids.length - KEPT)).forEach((old) => all.delete(old));
  } catch {
    // a browser that keeps nothing: the image is there until the page is left
  }
}

// {blob, name}, or undefined.
export async function find(id) {
  try {
    return await asked((await images("readonly")).get(id));
  } catch {
    return undefined;
  }
}
