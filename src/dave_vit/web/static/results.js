// The latest finished maps, by image and options: Back shows them at once, without a new computation.

const CAPACITY = 16; // as many as the server keeps files of

function keyOf({ image, options }) {
  return JSON.stringify([image, options]);
}

export class Results {
  constructor() {
    this.steps = new Map();
  }

  // step: the last one of a request
  keep(request, step) {
    this.steps.delete(keyOf(request)); // a map keeps the order of insertion: the newest come last
    this.steps.set(keyOf(request), step);
    if (this.steps.size > CAPACITY) this.steps.delete(this.steps.keys().next().value);
  }

  find(request) {
    return this.steps.get(keyOf(request));
  }
}
