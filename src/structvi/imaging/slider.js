"use strict";
// The page of `page.py`: voxels from base64 and deflate, three planes on canvases, sliders and clicks.
const page = JSON.parse(document.getElementById("data").textContent);
const [X, Y, Z] = page.shape;
const sides = [X, Y, Z];
const at = [...page.start];
// axis that is cut → axes to the right and upwards
const planes = [[1, 2], [0, 2], [0, 1]];
const letters = ["x", "y", "z"];
const palette = [[0, 0, 0], [230, 97, 60], [70, 150, 220], [110, 190, 90], [220, 190, 60], [170, 110, 200], [90, 200, 200],
  [230, 130, 170], [160, 160, 160]];
const anchors = [[68, 1, 84], [71, 44, 122], [59, 81, 139], [44, 113, 142], [33, 144, 141], [39, 173, 129], [92, 200, 99],
  [170, 220, 50], [253, 231, 37]];
const get = id => document.getElementById(id);

function colour(value) {  // 0 … 1
  const place = Math.min(Math.max(value, 0), 1) * (anchors.length - 1), i = Math.min(Math.floor(place), anchors.length - 2);
  return anchors[i].map((a, c) => a + (place - i) * (anchors[i + 1][c] - a));
}
const table = Array.from({length: 256}, (_, v) => colour(v / 255));

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), c => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function index(voxel) { return (voxel[0] * Y + voxel[1]) * Z + voxel[2]; }

function mixed(grey, value, layer, opacity) {
  let rgb = [grey, grey, grey], share = 0;
  if (layer.kind === "class") {
    if (value > 0) { rgb = palette[1 + (value - 1) % (palette.length - 1)]; share = opacity * 0.7; }
  } else if (layer.kind === "amount") {
    rgb = table[value]; share = opacity * Math.min(1, value / 64);  // none of it shows the input
  } else if (layer.name !== "input") {
    rgb = [value, value, value]; share = opacity;
  }
  return rgb.map(c => share * c + (1 - share) * grey);
}

function draw() {
  const layer = page.layers[get("layer").value], opacity = get("opacity").value / 100, input = page.layers[0].voxels;
  planes.forEach(([right, up], axis) => {
    const canvas = get("plane" + axis), w = sides[right], h = sides[up];
    canvas.width = w; canvas.height = h;
    const shape = w * page.spacing[right] / (h * page.spacing[up]);
    canvas.style.aspectRatio = shape;
    canvas.style.width = `min(100%, ${34 * shape}rem)`;  // at most 34 rem high
    const context = canvas.getContext("2d"), image = context.createImageData(w, h), voxel = [...at];
    for (let j = 0; j < h; j++) {
      voxel[up] = h - 1 - j;
      for (let i = 0; i < w; i++) {
        voxel[right] = i;
        const n = index(voxel), rgb = mixed(input[n], layer.voxels[n], layer, opacity), k = 4 * (j * w + i);
        image.data[k] = rgb[0]; image.data[k + 1] = rgb[1]; image.data[k + 2] = rgb[2]; image.data[k + 3] = 255;
      }
    }
    context.putImageData(image, 0, 0);
    context.fillStyle = "rgba(255, 255, 255, 0.22)";
    context.fillRect(at[right], 0, 1, h);
    context.fillRect(0, h - 1 - at[up], w, 1);
    get("at" + axis).textContent = `${letters[axis]} = ${at[axis] * page.step[axis]} · ${letters[right]} →, ${letters[up]} ↑`;
    get("slide" + axis).value = at[axis];
  });
  legend(layer);
  values();
}

function legend(layer) {
  const bar = get("bar"), context = bar.getContext("2d"), image = context.createImageData(128, 1);
  for (let i = 0; i < 128; i++) {
    const rgb = layer.kind === "amount" ? table[2 * i] : [2 * i, 2 * i, 2 * i];
    image.data.set([...rgb, 255], 4 * i);
  }
  context.putImageData(image, 0, 0);
  const named = layer.kind === "class";
  bar.hidden = named;
  get("low").textContent = named ? layer.names.slice(1).join(", ") : number(layer.low);
  get("high").textContent = named ? "" : `${number(layer.high)} ${layer.unit}`;
}

function number(value) { return Number(value.toPrecision(3)).toString(); }

function values() {
  get("values").replaceChildren(...page.layers.map(layer => {
    const row = document.createElement("tr"), v = layer.voxels[index(at)];
    const text = layer.kind === "class" ? layer.names[v] : `${number(layer.low + v / 255 * (layer.high - layer.low))} ${layer.unit}`;
    for (const [tag, words] of [["th", layer.name], ["td", text]]) {
      const cell = document.createElement(tag);
      cell.textContent = words;
      row.append(cell);
    }
    return row;
  }));
}

function clicked(event, axis) {
  const [right, up] = planes[axis], box = event.currentTarget.getBoundingClientRect();
  const a = (event.clientX - box.left) / box.width, b = 1 - (event.clientY - box.top) / box.height;
  at[right] = Math.min(sides[right] - 1, Math.max(0, Math.floor(a * sides[right])));
  at[up] = Math.min(sides[up] - 1, Math.max(0, Math.floor(b * sides[up])));
  draw();
}

async function start() {
  for (const layer of page.layers) layer.voxels = await unpack(layer.data);
  page.layers.forEach((layer, i) => get("layer").add(new Option(i ? layer.name : "nothing", i)));
  get("layer").value = page.layers.findIndex(layer => layer.name === "uncertainty");
  sides.forEach((length, axis) => {
    const slide = get("slide" + axis);
    slide.max = length - 1;
    slide.addEventListener("input", () => { at[axis] = Number(slide.value); draw(); });
    get("plane" + axis).addEventListener("click", event => clicked(event, axis));
  });
  for (const id of ["layer", "opacity"]) get(id).addEventListener("input", draw);
  draw();
  document.body.dataset.ready = "yes";
}
start();
