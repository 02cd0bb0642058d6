// From numbers to pixels.

const STRENGTH = 0.95; // how much of the image the largest value covers
const GREY = [0.299, 0.587, 0.114];

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

function unit(value) {
  return value > 1 ? 1 : value > 0 ? value : 0;
}

export function heat(canvas, { values, limit }, width, height, colours) {
  put(canvas, width, height, (data) => {
    values.forEach((value, at) => {
      const colour = 3 * Math.round(255 * unit(value / limit));
      for (let c = 0; c < 3; c++) data[4 * at + c] = colours[colour + c];
    });
  });
}

export function bar(canvas, colours) {
  heat(canvas, { values: Array.from({ length: 256 }, (_, at) => at), limit: 255 }, 256, 1, colours);
}

// mix 0 is the image, 1 the map; half way the map lies over a paler image, the more opaque the larger it is.
export function blend(canvas, image, map, soft, mix, colours) {
  const over = Math.min(1, 2 * mix);
  const bare = Math.max(0, 2 * mix - 1);
  put(canvas, image.width, image.height, (data) => {
    for (let at = 0; at < soft.length; at++) {
      const level = soft[at] + (unit(map.values[at] / map.limit) - soft[at]) * bare;
      const cover = STRENGTH * soft[at] * over;
      const alpha = cover + (1 - cover) * bare;
      const colour = 3 * Math.round(255 * level);
      const grey = GREY.reduce((sum, weight, c) => sum + weight * image.data[4 * at + c], 0);
      for (let c = 0; c < 3; c++) {
        const seen = image.data[4 * at + c];
        const pale = 38 + 0.75 * (0.35 * seen + 0.65 * grey);
        data[4 * at + c] = (1 - alpha) * (seen + (pale - seen) * over) + alpha * colours[colour + c];
      }
    }
  });
}
