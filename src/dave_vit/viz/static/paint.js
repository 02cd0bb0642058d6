// Draws maps: from numbers to pixels.

const STRENGTH = 0.95; // opacity of the largest value over the image
const GREY = [0.299, 0.587, 0.114];
const QUANTILE = 0.99; // share of the pixels below the brightest colour
const SIGNED_REACH = 0.7; // part of the signed colormap used over an image, where its dark ends would look black

// Returns the colours of a colormap, three bytes each.
export function colorTable(hexes) {
  const flat = hexes.flatMap((hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)));
  return Uint8ClampedArray.from(flat);
}

function drawPixels(canvas, width, height, fill) {
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  fill(image.data);
  for (let at = 3; at < image.data.length; at += 4) image.data[at] = 255;
  context.putImageData(image, 0, 0);
}

function clamp(value, low = 0) {
  return value > 1 ? 1 : value > low ? value : low;
}

// signed: from -limit to limit, else from 0
export function drawHeatmap(canvas, { values, limit }, width, height, colours, signed = false) {
  drawPixels(canvas, width, height, (data) => {
    values.forEach((value, at) => {
      const level = signed ? (clamp(value / limit, -1) + 1) / 2 : clamp(value / limit);
      const colour = 3 * Math.round(255 * level);
      for (let c = 0; c < 3; c++) data[4 * at + c] = colours[colour + c];
    });
  });
}

export function drawBar(canvas, colours) {
  drawHeatmap(canvas, { values: Array.from({ length: 256 }, (_, at) => at), limit: 255 }, 256, 1, colours);
}

// Returns the number that gets the brightest colour: a high quantile, as on the server.
export function limitOf(values) {
  const sizes = Float32Array.from(values, Math.abs).sort();
  return sizes[Math.round(QUANTILE * (sizes.length - 1))] || sizes[sizes.length - 1] || 1;
}

// Smooths with a Gaussian window of an odd number of pixels, normalized at the borders; signed: keeps negative values.
export function smoothMap(map, width, height, window, signed) {
  const values = signed ? map : map.map((value) => Math.max(0, value));
  if (window <= 1) return values;
  const reach = Math.floor(window / 2);
  const weights = Float32Array.from({ length: window }, (_, at) => Math.exp(-18 * ((at - reach) / window) ** 2));
  const rows = convolve(values, weights, reach, width, height, 1, width);
  return convolve(rows, weights, reach, height, width, width, 1);
}

// Convolves lines of a length; step: from one pixel to the next; stride: from one line to the next.
function convolve(values, weights, reach, length, lines, step, stride) {
  const result = new Float32Array(values.length);
  for (let line = 0; line < lines; line++) {
    for (let at = 0; at < length; at++) {
      let sum = 0;
      let total = 0;
      for (let by = Math.max(-reach, -at); by <= reach && at + by < length; by++) {
        sum += weights[by + reach] * values[line * stride + (at + by) * step];
        total += weights[by + reach];
      }
      result[line * stride + at * step] = sum / total;
    }
  }
  return result;
}

// Resamples a map bilinearly.
export function resample(values, width, height, newWidth, newHeight) {
  const result = new Float32Array(newWidth * newHeight);
  const [columns, rows] = [positions(width, newWidth), positions(height, newHeight)];
  for (let y = 0, at = 0; y < newHeight; y++) {
    const [top, bottom, down] = rows[y];
    for (let x = 0; x < newWidth; x++, at++) {
      const [left, right, across] = columns[x];
      const above = values[top * width + left] * (1 - across) + values[top * width + right] * across;
      const below = values[bottom * width + left] * (1 - across) + values[bottom * width + right] * across;
      result[at] = above * (1 - down) + below * down;
    }
  }
  return result;
}

// The two neighbours of each new position, and how far it lies between them.
function positions(size, newSize) {
  return Array.from({ length: newSize }, (_, at) => {
    const place = Math.min(size - 1, Math.max(0, ((at + 0.5) * size) / newSize - 0.5));
    const first = Math.floor(place);
    return [first, Math.min(size - 1, first + 1), place - first];
  });
}

// Draws a map over its image.
// mix: 0 is the image, 1 the map; half way the map lies over a paler image, the larger a value, the more opaque
// above: the share of the limit below which nothing is shown
export function drawOverlay(canvas, image, map, smoothed, { mix, above, signed }, colours) {
  const over = Math.min(1, 2 * mix);
  const bare = Math.max(0, 2 * mix - 1);
  const low = signed ? -1 : 0;
  const reach = SIGNED_REACH + (1 - SIGNED_REACH) * bare;
  drawPixels(canvas, image.width, image.height, (data) => {
    for (let at = 0; at < smoothed.values.length; at++) {
      const soft = clamp(smoothed.values[at] / smoothed.limit, low);
      const mixed = soft + (clamp(map.values[at] / map.limit, low) - soft) * bare;
      const level = Math.abs(mixed) < above ? 0 : mixed;
      const cover = level === 0 && above > 0 ? 0 : STRENGTH * Math.abs(soft) * over;
      const alpha = cover + (1 - cover) * bare;
      const colour = 3 * Math.round(255 * (signed ? (reach * level + 1) / 2 : level));
      const grey = GREY.reduce((sum, weight, c) => sum + weight * image.data[4 * at + c], 0);
      for (let c = 0; c < 3; c++) {
        const original = image.data[4 * at + c];
        const pale = 38 + 0.75 * (0.35 * original + 0.65 * grey);
        data[4 * at + c] = (1 - alpha) * (original + (pale - original) * over) + alpha * colours[colour + c];
      }
    }
  });
}

// Draws two maps as one picture: the first left of a divider from 0 to 1, the second right of it.
export function drawSwipe(canvas, first, second, divider) {
  canvas.width = Math.max(first.width, second.width);
  canvas.height = Math.max(first.height, second.height);
  const context = canvas.getContext("2d");
  const edge = Math.round(divider * canvas.width);
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
