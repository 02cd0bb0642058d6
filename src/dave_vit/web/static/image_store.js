// Images in this browser's database, by their names in the address: a reload finds them again.

const CAPACITY = 24;

function resultOf(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

async function openImages(mode) {
  const opening = indexedDB.open("dave", 1);
  opening.onupgradeneeded = () => opening.result.createObjectStore("images", { keyPath: "id" });
  return (await resultOf(opening)).transaction("images", mode).objectStore("images");
}

// Names increase with time, so that the oldest come first.
export function newName() {
  return Date.now().toString(36) + Math.random().toString(36).slice(2, 6);
}

export async function saveImage(id, blob, name) {
  try {
    const images = await openImages("readwrite");
    images.put({ id, blob, name });
    const ids = await resultOf(images.getAllKeys());
    ids.slice(0, Math.max(0, ids.length - CAPACITY)).forEach((oldest) => images.delete(oldest));
  } catch {
    // a browser without a database: the image is there until the page is left
  }
}

// Returns {blob, name}, or undefined.
export async function findImage(id) {
  try {
    return await resultOf((await openImages("readonly")).get(id));
  } catch {
    return undefined;
  }
}
