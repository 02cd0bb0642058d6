// From numbers to pixels.

const STRENGTH = 0.95; // how much of the image the largest value covers
const GREY = [0.299, 0.587, 0.114];
const QUANTILE = 0.99; // of the pixels, below the brightest colour
const SOFTENED = 0.7; // of the signed colours over an image, whose dark ends would be black there

export function table(hexes) {
  const flat = hexes.flatMap((hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)));
  return Uint8ClampedArray.from(flat);
}

function put(canvas, width, height, fill) {
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  fill(image.data);
  for (let at = 3; at < image.data.length; at += 4) image.data[at] = 255;
  context.putImageData(image, 0, 0);
}

function unit(value, low = 0) {
  return value > 1 ? 1 : value > low ? value : low;
}

// signed: from -limit to limit, else from 0
export function heat(canvas, { values, limit }, width, height, colours, signed = false) {
  put(canvas, width, height, (data) => {
    values.forEach((value, at) => {
      const level = signed ? (unit(value / limit, -1) + 1) / 2 : unit(value / limit);
      const colour = 3 * Math.round(255 * level);
      for (let c = 0; c < 3; c++) data[4 * at + c] = colours[colour + c];
    });
  });
}

export function bar(canvas, colours) {
  heat(canvas, { values: Array.from({ length: 256 }, (_, at) => at), limit: 255 }, 256, 1, colours);
}

// The number that gets the brightest colour: a high quantile, as on the server.
export function limitOf(values) {
  const sizes = Float32Array.from(values, Math.abs).sort();
  return sizes[Math.round(QUANTILE * (sizes.length - 1))] || sizes[sizes.length - 1] || 1;
}

// A Gaussian window of some pixels, odd; outside of the image there is nothing.
export function smooth(values, width, height, window) {
  if (window <= 1) return values;
  const reach = Math.floor(window / 2);
  const weights = Float32Array.from({ length: window }, (_, at) => Math.exp(-18 * ((at - reach) / window) ** 2));
  const rows = filtered(values, weights, reach, width, height, 1, width);
  return filtered(rows, weights, reach, height, width, width, 1);
}

// Along lines of a length: step is from one pixel to the next, stride from one line to the next.
function filtered(values, weights, reach, length, lines, step, stride) {
  const made = new Float32Array(values.length);
  for (let line = 0; line < lines; line++) {
    for (let at = 0; at < length; at++) {
      let sum = 0;
      let total = 0;
      for (let by = Math.max(-reach, -at); by <= reach && at + by < length; by++) {
        sum += weights[by + reach] * values[line * stride + (at + by) * step];
        total += weights[by + reach];
      }
      made[line * stride + at * step] = sum / total;
    }
  }
  return made;
}

// How a map lies over its image.
// mix: 0 is the image, 1 the map; half way the map lies over a paler image, the more opaque the larger it is
// above: the share of the limit below which nothing is shown
export function blend(canvas, image, map, soft, { mix, above, signed }, colours) {
  const over = Math.min(1, 2 * mix);
  const bare = Math.max(0, 2 * mix - 1);
  const low = signed ? -1 : 0;
  const reach = SOFTENED + (1 - SOFTENED) * bare;
  put(canvas, image.width, image.height, (data) => {
    for (let at = 0; at < soft.values.length; at++) {
      const softened = unit(soft.values[at] / soft.limit, low);
      const mixed = softened + (unit(map.values[at] / map.limit, low) - softened) * bare;
      const level = Math.abs(mixed) < above ? 0 : mixed;
      const cover = level === 0 && above > 0 ? 0 : STRENGTH * Math.abs(softened) * over;
      const alpha = cover + (1 - cover) * bare;
      const colour = 3 * Math.round(255 * (signed ? (reach * level + 1) / 2 : level));
      const grey = GREY.reduce((sum, weight, c) => sum + weight * image.data[4 * at + c], 0);
      for (let c = 0; c < 3; c++) {
        const seen = image.data[4 * at + c];
        const pale = 38 + 0.75 * (0.35 * seen + 0.65 * grey);
        data[4 * at + c] = (1 - alpha) * (seen + (pale - seen) * over) + alpha * colours[colour + c];
      }
    }
  });
}

// Two drawn maps as one picture: the first left of a place from 0 to 1, the second right of it.
export function swipe(canvas, first, second, place) {
  canvas.width = Math.max(first.width, second.width);
  canvas.height = Math.max(first.height, second.height);
  const context = canvas.getContext("2d");
  const edge = Math.round(place * canvas.width);
  context.imageSmoothingEnabled = false;
  context.drawImage(second, 0, 0, canvas.width, canvas.height);
  context.save();
  context.beginPath();
  context.rect(0, 0, edge, canvas.height);
  context.clip();
  context.drawImage(first, 0, 0, canvas.width, canvas.height);
  context.restore();
  context.fillStyle = "#fff";
  if (edge > 0 && edge < canvas.width) context.fillRect(edge, 0, 1, canvas.height);
}
