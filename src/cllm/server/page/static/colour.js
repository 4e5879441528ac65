// One hue for each holder of memory; how light and how strong it is says what state the memory is in.

import { isDark } from "./theme.js";

export const CACHED = 1;
export const SHARED = 2;
export const PRIVATE = 3;

// Lightness and chroma of each state, in OKLCH, where equal numbers look equally light whatever the hue.
const TONES = {
  dark: { [CACHED]: [0.4, 0.065], [SHARED]: [0.64, 0.13], [PRIVATE]: [0.84, 0.14] },
  light: { [CACHED]: [0.87, 0.05], [SHARED]: [0.71, 0.12], [PRIVATE]: [0.56, 0.17] },
};
const GOLDEN_ANGLE = 137.508;

export function rgbOf(code) {
  const [lightness, chroma] = TONES[isDark() ? "dark" : "light"][code & 3];
  const hue = (165 + (code >>> 2) * GOLDEN_ANGLE) % 360;
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
