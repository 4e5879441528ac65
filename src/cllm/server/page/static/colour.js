// One hue for each holder of memory; how light and how strong it is says what state the memory is in. Where layers differ
// in what they keep, the hues of each group lie in a part of the circle of their own.

import { isDark } from "./theme.js";

export const CACHED = 1;
export const SHARED = 2;
export const PRIVATE = 3;

export const FULL = 0;
export const WINDOW = 1;
export const STATE = 2;

const GROUP_BIT = 29;
const NUMBERS = (1 << (GROUP_BIT - 2)) - 1;

export const codeOf = (number, state) => number * 4 + state;
export const holderOf = (code) => (code >>> 2) & NUMBERS;
export const stateOf = (code) => code & 3;
export const groupOf = (code) => code >>> GROUP_BIT;

// Lightness and chroma of each state, in OKLCH, where equal numbers look equally light whatever the hue.
const TONES = {
  dark: { [CACHED]: [0.4, 0.065], [SHARED]: [0.64, 0.13], [PRIVATE]: [0.84, 0.14] },
  light: { [CACHED]: [0.87, 0.05], [SHARED]: [0.71, 0.12], [PRIVATE]: [0.56, 0.17] },
};
const GOLDEN_PART = 0.381966;
const HUES = { [FULL]: [165, 150], [WINDOW]: [62, 26], [STATE]: [4, 26] }; // where they begin, and how many
let hues = { [FULL]: [165, 360] };

/** Whether there are several groups of layers to tell apart. */
export function tellApart(several) {
  hues = several ? HUES : { [FULL]: [165, 360] };
}

export function rgbOf(code) {
  const [lightness, chroma] = TONES[isDark() ? "dark" : "light"][stateOf(code)];
  const [first, span] = hues[groupOf(code)];
  const hue = first + span * ((holderOf(code) * GOLDEN_PART) % 1);
  return fromOklch(lightness, chroma, (hue * Math.PI) / 180);
}

export function cssOf(code) {
  return `rgb(${rgbOf(code).join(" ")})`;
}

/** Red, green and blue as one number, as they lie in the pixels of an image. */
export function pixelOf([red, green, blue]) {
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

export function rgbOfCss(text) {
  return text.match(/\d+/g).slice(0, 3).map(Number);
}

function fromOklch(lightness, chroma, hue) {
  const a = chroma * Math.cos(hue);
  const b = chroma * Math.sin(hue);
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ].map(toByte);
}

function toByte(linear) {
  const clipped = Math.min(1, Math.max(0, linear));
  const encoded = clipped <= 0.0031308 ? 12.92 * clipped : 1.055 * clipped ** (1 / 2.4) - 0.055;
  return Math.round(encoded * 255);
}
