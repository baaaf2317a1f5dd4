"use strict";
// An update as a Gantt chart: rows of stages (the plan) above rows of ranks (the measurement), on
// one time axis. uPlot has the axes, the zoom and the pointer; a hook of its paints the bars.
const drawTimeline = (timeline, box, {make, css, shown, colours}) => {
  const HEIGHTS = {forward: 0.55, backward: 0.9, reduce: 0.3, norm: 0.3, step: 0.9};
  const NAMES = {reduce: "gradient reduction", norm: "gradient norm", step: "optimizer step"};
  const roles = [...new Set(timeline.actions.map((action) => action[1]))].sort();
  const chunks = timeline.actions.some((action) => action[4] > 0);
  const count = timeline.panels.reduce((sum, panel) => sum + panel.rows.length, 0);
  const high = Math.max(5, Math.min(20, Math.floor(640 / count)));

  const every = Math.ceil(14 / high);
  const rows = [];  // from the top; a title takes rows without bars
  const titles = [];
  let span = 0;
  for (const panel of timeline.panels) {
    const of = panel.rows.length < panel.of ? `, ${panel.rows.length} of ${panel.of} ${panel.row}s` : "";
    const kind = panel.name === "plan" ? `${timeline.schedule} plan` : panel.name;
    titles.push([rows.length, `${kind}: ${Math.round(100 * panel.idle)}% idle${of}`]);
    for (let i = 0; i < Math.ceil(18 / high); i++) rows.push({bars: []});
    let place = 0;
    for (const [number, flat] of panel.rows) {
      const row = {label: `${panel.row} ${number}`, panel: panel.name, bars: [], labelled: place++ % every === 0};
      let clock = 0;
      for (let i = 0; i < flat.length; i += 3) {
        const start = clock + flat[i + 1];
        clock = start + flat[i + 2];
        row.bars.push({start: start * timeline.unit, end: clock * timeline.unit, action: timeline.actions[flat[i]]});
      }
      span = Math.max(span, clock * timeline.unit);
      rows.push(row);
    }
  }

  const ink = css("--text");
  const colourOf = ([kind, role, miniBatch]) =>
    kind === "step" ? ink : colours[roles.indexOf(role) % colours.length] + (miniBatch % 2 ? "99" : "ff");

  const paint = (u) => {
    const {ctx, bbox} = u;
    const {min, max} = u.scales.x;
    const perSecond = bbox.width / (max - min);
    const tall = u.valToPos(-1, "y", true) - u.valToPos(0, "y", true);
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.font = `${10 * devicePixelRatio}px system-ui`;
    ctx.textBaseline = "middle";
    ctx.textAlign = "left";
    rows.forEach((row, place) => {
      const middle = u.valToPos(-place, "y", true);
      for (const {start, end, action} of row.bars) {
        if (end < min || start > max) continue;
        const left = bbox.left + (start - min) * perSecond;
        const wide = Math.max((end - start) * perSecond, 0.7);
        const height = tall * HEIGHTS[action[0]];
        ctx.fillStyle = colourOf(action);
        // a gap between neighbours where there is room for one
        ctx.fillRect(left, middle - height / 2, wide > 4 ? wide - 1 : wide, height);
        if (action[0] in NAMES || wide < 18 * devicePixelRatio || height < 9 * devicePixelRatio) continue;
        ctx.fillStyle = "#fff";
        ctx.fillText(action[3], left + 4 * devicePixelRatio, middle);
      }
    });
    ctx.fillStyle = ink;
    ctx.font = `${12 * devicePixelRatio}px system-ui`;
    for (const [place, title] of titles) {
      ctx.fillText(title, bbox.left + 2, u.valToPos(-place + 0.5, "y", true) + 9 * devicePixelRatio);
    }
    ctx.restore();
  };

  const numbers = make("div", {class: "numbers"}, "hover a bar for its numbers");
  const barAt = (u) => {
    const {left, top} = u.cursor;
    if (left == null || left < 0) return null;
    const row = rows[Math.round(-u.posToVal(top, "y"))];
    const time = u.posToVal(left, "x");
    const pixel = u.posToVal(1, "x") - u.posToVal(0, "x");
    let low = 0, past = row ? row.bars.length : 0;
    while (low < past) {  // the first bar that starts after the pointer
      const middle = (low + past) >> 1;
      if (row.bars[middle].start <= time + pixel) low = middle + 1; else past = middle;
    }
    const bar = low ? row.bars[low - 1] : null;
    return bar && time <= bar.end + pixel ? [row, bar] : null;
  };
  const point = (u) => {
    const found = barAt(u);
    if (!found) return;
    const [row, {start, end, action: [kind, role, miniBatch, microBatch, chunk]}] = found;
    const parts = [role, `mini-batch ${miniBatch}`];
    if (!(kind in NAMES)) parts.push(`micro-batch ${microBatch}`);
    if (chunks && !(kind in NAMES)) parts.push(`chunk ${chunk}`);
    numbers.textContent = `${row.label} (${row.panel}): ${parts.join(", ")}, ${NAMES[kind] || kind}: ` +
      `start ${shown(start)} s, length ${shown(end - start)} s`;
  };

  const line = {stroke: css("--line"), width: 1};
  const axis = {stroke: css("--faint"), grid: line, ticks: line};
  const labelled = rows.flatMap((row, place) => row.labelled ? [-place] : []);
  const options = {
    width: Math.max(box.clientWidth, 120), height: rows.length * high + 50,
    scales: {x: {time: false}, y: {range: [0.5 - rows.length, 0.5]}},
    axes: [
      {...axis, values: (u, ticks) => ticks.map((tick) => `${shown(tick)} s`)},
      {...axis, grid: {show: false}, size: 78, splits: () => labelled, values: (u, places) => places.map((place) => rows[-place].label)},
    ],
    cursor: {points: {show: false}, y: false, drag: {x: true, y: false}},
    legend: {show: false},
    series: [{}, {points: {show: false}}],
    hooks: {draw: [paint], setCursor: [point]},
  };
  const swatches = roles.map((role, i) => [role, colours[i % colours.length]]).concat([["optimizer step", ink]]);
  const legend = make("p", {class: "faint"}, ...swatches.flatMap(([name, colour]) =>
    [make("span", {class: "swatch", style: `background:${colour}`}), ` ${name}, `]),
  "tall: backward, low: forward, faint: every other mini-batch. Drag to zoom, or turn the wheel with Ctrl; double-click to reset.");
  const place = make("div");
  box.append(legend, place, numbers);
  const plot = new uPlot(options, [[0, span], [null, null]], place);
  plot.over.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    const {min, max} = plot.scales.x;
    const at = plot.posToVal(event.offsetX, "x");
    const factor = event.deltaY < 0 ? 0.7 : 1 / 0.7;
    plot.setScale("x", {min: Math.max(at - (at - min) * factor, 0), max: Math.min(at + (max - at) * factor, span)});
  }, {passive: false});
  return {plot, rows};
};
