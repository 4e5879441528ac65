// Numbers as people read them.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(count) {
  let unit = 0;
  while (count >= 1024 && unit < UNITS.length - 1) {
    count /= 1024;
    unit += 1;
  }
  return `${count >= 100 || unit === 0 ? Math.round(count) : Number(count.toPrecision(3))} ${UNITS[unit]}`;
}

export function whole(count) {
  return Math.round(count).toLocaleString("en");
}

export function rate(perSecond) {
  return perSecond >= 100 ? whole(perSecond) : perSecond.toFixed(1);
}

export function percent(part, all) {
  if (!all) return "–";
  const share = (100 * part) / all;
  return share > 0 && share < 1 ? "< 1 %" : `${Math.round(share)} %`;
}

export function duration(seconds) {
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const minutes = Math.floor(seconds / 60);
  return `${minutes}:${String(Math.floor(seconds % 60)).padStart(2, "0")} min`;
}

/** Time that is left, no more exactly than anybody needs. */
export function span(seconds) {
  if (seconds < 60) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  return seconds < 48 * 3600 ? `${Math.floor(seconds / 3600)} h` : `${Math.floor(seconds / 86400)} days`;
}

export function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString("en-GB");
}
