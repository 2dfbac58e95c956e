// Where values lie in a chart. Pure.

/** The next of 1, 2, 2.5, 5 times a power of ten. */
export function niceTop(most) {
  if (!(most > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(most));
  return [1, 2, 2.5, 5, 10].map((step) => step * power).find((top) => top >= most * 0.999);
}

export function linear({ most, top }) {
  const end = top ?? niceTop(most);
  return { ticks: [0, end / 2, end], of: (value) => Math.min(1, Math.max(0, value / end)) };
}

/** Around 1, as far above as below. */
export function balance(widest = 8) {
  const span = Math.log(widest);
  return {
    ticks: [1 / widest, 1, widest],
    of: (value) => (value <= 0 ? 0 : Math.min(1, Math.max(0, 0.5 + Math.log(value) / (2 * span)))),
  };
}

/** SVG path data; what is null is a gap, and a value on its own a dot. `x(i)`, `y(value)` in pixels. */
export function pathOf(values, x, y) {
  let path = "";
  let drawing = false;
  values.forEach((value, i) => {
    if (value === null || value === undefined) {
      drawing = false;
      return;
    }
    const at = `${x(i).toFixed(1)} ${y(value).toFixed(1)}`;
    const alone = !drawing && (values[i + 1] === null || values[i + 1] === undefined);
    path += `${drawing ? "L" : "M"}${at}${alone ? "h0.01" : ""}`;
    drawing = true;
  });
  return path;
}

/** What lies below the same lines. */
export function areaOf(values, x, y, floor) {
  let path = "";
  let run = [];
  [...values, null].forEach((value, i) => {
    if (value !== null && value !== undefined) {
      run.push([x(i).toFixed(1), y(value).toFixed(1)]);
      return;
    }
    if (run.length > 1) path += `M${run[0][0]} ${floor}L${run.map((at) => at.join(" ")).join("L")}L${run.at(-1)[0]} ${floor}Z`;
    run = [];
  });
  return path;
}

/** Least, mean, most and last of what is known; null: nothing is. */
export function summaryOf(values) {
  const known = values.filter((value) => value !== null && value !== undefined);
  if (!known.length) return null;
  return {
    least: Math.min(...known),
    mean: known.reduce((sum, value) => sum + value, 0) / known.length,
    most: Math.max(...known),
    last: known[known.length - 1],
  };
}
