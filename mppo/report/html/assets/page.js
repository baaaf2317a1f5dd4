"use strict";
(() => {
  const page = document.getElementById("page");
  const live = "live" in document.documentElement.dataset;
  let data = JSON.parse(document.getElementById("data").textContent);
  let plots = [];
  let colouring = "advantage";
  const COLOURS = ["#2f7ed8", "#e5732e", "#2ca02c", "#b14fc5", "#c9a300", "#d6336c", "#12a3a8", "#8c6d5a"];
  const DASHES = [[], [6, 4], [2, 3], [10, 4, 2, 4]];

  // text is always set as text: nothing of a run is ever parsed as HTML
  const make = (tag, attributes = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) {
      if (key === "class") node.className = value; else node.setAttribute(key, value);
    }
    node.append(...children);
    return node;
  };
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const shown = (value) => value == null ? "–" : Number(value.toPrecision(5)).toString();

  const short = (value) => Number(value.toPrecision(3)).toString();

  const table = (heads, rows) => {
    const body = make("tbody");
    for (const [kind, cells] of rows) {
      body.append(make("tr", kind ? {class: kind} : {}, ...cells.map((c) => make("td", {}, String(c)))));
    }
    const head = make("tr", {}, ...heads.map((h) => make("th", {}, h)));
    return make("div", {class: "scroll"}, make("table", {}, make("thead", {}, head), body));
  };

  const LOOKS = {good: "✓", bad: "✗", unknown: "·"};
  const headline = (run) => {
    const {answers, figures, phases} = run.headline;
    const answered = make("dl", {class: "answers"});
    for (const [question, answer, look] of answers) {
      answered.append(make("dt", {}, question), make("dd", {class: look}, `${LOOKS[look]} ${answer}`));
    }
    const box = make("div", {class: "headline"}, answered);
    if (data.runs.length > 1) return box;  // one table holds the numbers of all
    if (figures.length) {
      box.append(table(["", "first", "last", "best"],
        figures.map(([label, ...values]) => ["", [label, ...values.map((v) => v == null ? "" : short(v))]])));
    }
    if (phases.length) {
      box.append(table(["phase", "seconds", "share"], phases.map(([name, seconds, share, part]) =>
        [part ? "faint" : "", [part ? `of which ${name}` : name, short(seconds), `${(100 * share).toFixed(0)}%`]])));
    }
    return box;
  };

  const compared = () => {
    const names = data.runs.map((run) => run.name);
    page.append(make("h2", {}, "Difference of the recipes"), data.recipes.length
      ? table(["key", ...names], data.recipes.map((row) => ["", [row.key, ...row.values]]))
      : make("p", {class: "faint"}, "none"));
    code("Difference of the code", true);
    const labels = [...new Set(data.runs.flatMap((run) => run.headline.figures.map(([label]) => label)))];
    const cell = (run, label) => {
      const found = run.headline.figures.find(([name]) => name === label);
      if (!found) return "";
      const [, first, last, best] = found;
      return `${short(first)} → ${short(last)}` + (best == null ? "" : ` (best ${short(best)})`);
    };
    const rows = labels.map((label) => ["", [label, ...data.runs.map((run) => cell(run, label))]]);
    const phases = [...new Set(data.runs.flatMap((run) => run.headline.phases.map(([name]) => name)))];
    for (const phase of phases) {
      rows.push(["", [`seconds of ${phase}`, ...data.runs.map((run) => {
        const found = run.headline.phases.find(([name]) => name === phase);
        return found ? `${short(found[1])} (${(100 * found[2]).toFixed(0)}%)` : "";
      })]]);
    }
    if (rows.length) page.append(make("h2", {}, "Side by side"), table(["first → last", ...names], rows));
  };
  const code = (title, open) => {
    if (!data.code.length) return;
    page.append(make("h2", {}, title));
    for (const {title: name, lines} of data.code) {
      const text = make("pre", {class: "code"});
      for (const line of lines) {
        const kind = !open ? "" : line.startsWith("+") ? "added" : line.startsWith("-") ? "removed" : "";
        text.append(make("span", kind ? {class: kind} : {}, `${line}\n`));
      }
      page.append(make("details", open ? {open: ""} : {}, make("summary", {}, name), text));
    }
  };

  const header = () => {
    const several = data.runs.length > 1;
    for (const [i, run] of data.runs.entries()) {
      const row = make("div", {class: "run"});
      if (several) row.append(make("span", {class: "swatch", style: `background:${COLOURS[i % COLOURS.length]}`}));
      row.append(make("h1", {}, run.name), make("span", {class: "faint"}, run.status));
      page.append(row, headline(run));
      const warned = run.warnings.slice(0, 12);
      if (!warned.length) continue;
      const box = make("div", {class: "warnings"});
      for (const w of warned) {
        const steps = w.first === w.last ? `step ${w.first}` : `steps ${w.first} to ${w.last}`;
        box.append(make("p", w.ongoing ? {} : {class: "faint"}, make("strong", {}, `${steps}: `), w.text));
      }
      if (run.warnings.length > warned.length) {
        box.append(make("p", {class: "faint"}, `and ${run.warnings.length - warned.length} more`));
      }
      page.append(box);
    }
  };

  const xOf = (line) => line.x || data.runs[line.run].steps;
  const colourOf = (plot, i) => {
    if (data.runs.length === 1 || plot.kind === "stack") return [COLOURS[i % COLOURS.length], DASHES[Math.floor(i / COLOURS.length) % 4]];
    const line = plot.lines[i];
    const before = plot.lines.slice(0, i).filter((other) => other.run === line.run).length;
    return [COLOURS[line.run % COLOURS.length], DASHES[before % 4]];
  };
  const nameOf = (plot, line) => {
    const run = data.runs.length > 1 && plot.kind === "lines" ? data.runs[line.run].name : "";
    return [run, line.label].filter(Boolean).join(" · ") || plot.title;
  };
  const tables = (plot) => {
    // lines of one run share their steps: joined at once, not one by one
    const groups = new Map();
    plot.lines.forEach((line, i) => {
      const key = line.x ? `x${i}` : `r${line.run}`;
      if (!groups.has(key)) groups.set(key, {x: xOf(line), places: []});
      groups.get(key).places.push(i);
    });
    const parts = [...groups.values()];
    const joined = parts.length === 1
      ? [parts[0].x, ...parts[0].places.map((i) => plot.lines[i].y)]
      : uPlot.join(parts.map((part) => [part.x, ...part.places.map((i) => plot.lines[i].y)]));
    const order = parts.flatMap((part) => part.places);
    const columns = [joined[0]];
    order.forEach((place, i) => { columns[place + 1] = joined[i + 1]; });
    return columns;
  };
  const STEPS = [1, 2, 5].flatMap((n) => [0, 1, 2, 3, 4, 5, 6, 7, 8].map((p) => n * 10 ** p)).sort((a, b) => a - b);
  // as many digits as tell two labels apart; powers of ten for small and large numbers
  const ticks = (u, values, axis, space, step) => {
    const largest = Math.max(...values.map(Math.abs));
    const power = Math.floor(Math.log10(step) + 1e-9);
    const extra = Math.abs(step / 10 ** power - Math.round(step / 10 ** power)) > 1e-6 ? 1 : 0;  // 2.5
    if (largest < 1e-3 || largest >= 1e6) {
      const digits = Math.max(Math.floor(Math.log10(largest) + 1e-9) - power + extra, 0);
      return values.map((v) => Math.abs(v) < step / 1e6 ? "0" : v.toExponential(Math.min(digits, 8)));
    }
    return values.map((v) => v.toFixed(Math.min(Math.max(extra - power, 0), 10)));
  };
  const around = (u, low, high) => {
    if (low == null) return [0, 1];
    if (u.data[0].length === 1) return [u.data[0][0] - 1, u.data[0][0] + 1];  // of one point uPlot makes 0 to 100
    return low === high ? [low - 1, high + 1] : [low, high];
  };
  const range = (u, low, high) => {
    if (low == null) return [0, 1];
    if (low !== high) return uPlot.rangeNum(low, high, 0.1, true);
    return low === 0 ? [0, 1] : [low - Math.abs(low) / 10, low + Math.abs(low) / 10];
  };
  const axes = (unit, extra = {}) => {
    const common = {stroke: css("--faint"), grid: {stroke: css("--line"), width: 1}, ticks: {stroke: css("--line"), width: 1}};
    return [{...common, incrs: STEPS}, {...common, values: ticks, label: unit, labelSize: 18, labelFont: "11px system-ui", size: 62, ...extra}];
  };

  const draw = (plot, box) => {
    const columns = tables(plot);
    let shownColumns = columns;
    const options = {
      width: Math.max(box.clientWidth, 120), height: 230,
      scales: {x: {time: false, range: around}, y: {range}}, axes: axes(plot.unit), cursor: {focus: {prox: 24}},
      legend: {show: plot.lines.length < 25}, series: [{label: "step"}],
    };
    plot.lines.forEach((line, i) => {
      const [stroke, dash] = colourOf(plot, i);
      const sparse = xOf(line).length < 60;
      options.series.push({
        label: nameOf(plot, line), stroke, dash, width: 1.4, spanGaps: true,
        points: {show: sparse, size: 5}, value: (u, value) => shown(value),
      });
    });
    if (plot.kind === "stack") {
      const sums = new Array(columns[0].length).fill(0);
      shownColumns = [columns[0], ...columns.slice(1).map((column) => column.map((v, i) => (sums[i] += v || 0)))];
      options.bands = plot.lines.slice(1).map((_, i) => ({series: [i + 2, i + 1]}));
      plot.lines.forEach((_, i) => {
        const series = options.series[i + 1];
        series.fill = series.stroke + "55";
        series.points = {show: columns[0].length < 3};
        series.value = (u, v, s, at) => at == null ? "–" : shown(columns[i + 1][at]);
      });
    }
    return new uPlot(options, shownColumns, box);
  };

  const heatColour = (load) => {
    // 1 is an even load; each further multiple is hotter
    const heat = Math.min(Math.max((load - 1) / 3, 0), 1);
    return `hsl(${230 - 220 * heat} 75% ${32 + 25 * heat}%)`;
  };
  const drawHeat = (plot, box) => {
    const columns = tables(plot);
    const rows = plot.lines.length;
    const middles = columns.slice(1).map((_, i) => columns[0].map(() => i));
    const loads = columns.slice(1);
    const cells = (u) => {
      const {ctx} = u;
      const xs = u.data[0];
      const high = Math.abs(u.valToPos(1, "y", true) - u.valToPos(0, "y", true));
      const every = Math.max(1, Math.floor(xs.length / u.bbox.width));
      ctx.save();
      for (let i = 0; i < xs.length; i += every) {
        const next = i + every < xs.length ? xs[i + every] : xs[i] + every;
        const left = u.valToPos(xs[i], "x", true);
        const wide = Math.max(u.valToPos(next, "x", true) - left, 1) + 0.6;
        for (let row = 0; row < rows; row++) {
          let load = -Infinity;
          for (let k = i; k < Math.min(i + every, xs.length); k++) load = Math.max(load, loads[row][k] ?? -Infinity);
          if (load === -Infinity) continue;
          ctx.fillStyle = heatColour(1 + load);
          ctx.fillRect(left, u.valToPos(row, "y", true) - high / 2, Math.min(wide, u.bbox.left + u.bbox.width - left), high);
        }
      }
      ctx.restore();
    };
    const layers = plot.lines.map((line) => line.label.replace("/moe/layer_", " "));
    const options = {
      width: Math.max(box.clientWidth, 120), height: Math.min(120 + 16 * rows, 420),
      scales: {x: {time: false}, y: {range: [-0.5, rows - 0.5]}},
      axes: axes(plot.unit, {splits: () => layers.map((_, i) => i).filter((i) => i % Math.ceil(rows / 12) === 0), values: (u, at) => at.map((i) => layers[i]), size: 84}),
      legend: {show: rows < 13},
      series: [{label: "step"}, ...layers.map((label, i) => ({
        label, stroke: "transparent", points: {show: false},
        value: (u, v, s, at) => at == null ? "–" : shown(loads[i][at] == null ? null : 1 + loads[i][at]),
      }))],
      hooks: {drawClear: [], drawAxes: [], draw: [cells]},
    };
    return new uPlot(options, [columns[0], ...middles], box);
  };

  const drawPlots = () => {
    page.append(make("h2", {}, "Numbers"));
    const grid = make("div", {class: "grid", id: "plots"});
    page.append(grid);
    window.mppoPlots = {};
    for (const plot of data.plots) {
      const box = make("div");
      const run = plot.kind !== "lines" && data.runs.length > 1 ? ` · ${data.runs[plot.lines[0].run].name}` : "";
      grid.append(make("section", {class: "card", id: plot.id}, make("h3", {}, plot.title + run), box));
      const drawn = plot.kind === "heat" ? drawHeat(plot, box) : draw(plot, box);
      plots.push([drawn, box]);
      window.mppoPlots[plot.id] = drawn;
    }
    if (!data.plots.length) grid.append(make("p", {class: "faint"}, "no step has been logged yet"));
  };

  let wanted = "";  // what is searched for, and the metrics that are drawn: kept when a page is served
  const drawn = new Set();
  const allMetrics = () => {
    if (!data.metrics.length) return;
    const search = make("input", {type: "search", id: "search", placeholder: "search, such as acc", value: wanted, "aria-label": "search"});
    const count = make("span", {class: "faint"});
    const body = make("tbody");
    const heads = ["first", "last", "smallest", "largest"];
    const several = data.runs.length > 1;
    const columns = several ? data.runs.map((run) => `${run.name}: first → last`) : heads;
    const rows = [];
    for (const metric of data.metrics) {
      const cells = several
        ? metric.runs.map((found) => found ? `${shown(found.numbers[0])} → ${shown(found.numbers[1])}` : "")
        : metric.runs[0].numbers.map(shown);
      const button = make("button", {type: "button"}, metric.name);
      const row = make("tr", {}, make("td", {}, button), ...cells.map((cell) => make("td", {}, cell)));
      const place = make("td", {colspan: cells.length + 1});
      const below = make("tr", {hidden: ""}, place);
      let made = null;
      const show = () => {
        below.hidden = !drawn.has(metric.name);
        if (below.hidden || made) return;
        const lines = metric.runs.flatMap((found, run) => found ? [{run, label: "", x: found.x, y: found.y}] : []);
        made = draw({title: metric.name, unit: "", kind: "lines", lines}, place);
        plots.push([made, place]);
        window.mppoPlots[metric.name] = made;
      };
      button.addEventListener("click", () => {
        if (!drawn.delete(metric.name)) drawn.add(metric.name);
        show();
      });
      body.append(row, below);
      rows.push([metric.name, row, below, show]);
    }
    const filter = () => {
      wanted = search.value;
      const words = wanted.toLowerCase().split(/\s+/).filter(Boolean);
      let visible = 0;
      for (const [name, row, below] of rows) {
        const matches = words.every((word) => name.toLowerCase().includes(word));
        row.hidden = !matches;
        below.hidden = !matches || !drawn.has(name);
        visible += matches;
      }
      count.textContent = ` ${visible} of ${rows.length}; a click on a name draws it`;
    };
    search.addEventListener("input", filter);
    const head = make("tr", {}, ...["metric", ...columns].map((h) => make("th", {}, h)));
    page.append(make("h2", {}, "All metrics"), make("p", {}, search, count),
      make("div", {class: "scroll all", id: "all"}, make("table", {}, make("thead", {}, head), body)));
    for (const [, , , show] of rows) show();
    filter();
  };

  const timelines = () => {
    window.mppoTimelines = {};
    for (const [i, run] of data.runs.entries()) {
      const of = data.runs.length > 1 ? ` · ${run.name}` : "";
      for (const timeline of run.timelines) {
        const card = make("section", {class: "card", id: `timeline-${i}-${timeline.step}`});
        page.append(make("h2", {}, `Timeline of the update in step ${timeline.step}${of}: plan above measurement`), card);
        if (timeline.error) {
          card.append(make("p", {class: "faint"}, timeline.error));
          continue;
        }
        const drawn = drawTimeline(timeline, card, {make, css, shown, colours: COLOURS});
        plots.push([drawn.plot, drawn.plot.root.parentElement]);
        window.mppoTimelines[card.id] = drawn;
      }
    }
  };

  const COLOURINGS = ["advantage", "ratio", "kl", "value", "entropy"];
  const strength = (name, value) => name === "ratio" ? Math.log(Math.max(value, 1e-6)) : value;
  const paint = (spans, values, name) => {
    const numbers = values.map((v) => v == null ? 0 : strength(name, v));
    const largest = Math.max(...numbers.map(Math.abs), 1e-12);
    spans.forEach((span, i) => {
      const share = numbers[i] / largest;
      const hue = share < 0 ? 215 : 18;
      span.style.background = `hsl(${hue} 90% 55% / ${(0.65 * Math.abs(share)).toFixed(3)})`;
    });
  };
  const sequence = (row) => {
    const end = `score ${shown(row.score)}, ${row.end}, ground truth ${row.truth || "–"}`;
    const from = row.parent == null ? row.sequences > 1 ? `, of ${row.sequences} of its episode` : "" : row.shared
      ? `, from sequence ${row.parent} after token ${row.shared}` : `, of the episode of sequence ${row.parent}`;
    const title = `step ${row.step}, sequence ${row.sequence}${from}: ${end}`;
    const hidden = Math.max(row.shared - row.prompt_tokens, 0);  // numbers of tokens that the parent shows
    const text = make("div", {class: "tokens"});
    const numbers = make("div", {class: "numbers"}, "hover a token for its numbers");
    const spans = [], others = new Set(row.by_environment);
    row.pieces.forEach((piece, i) => {
      if (i < row.shared) return;
      const after = i - row.prompt_tokens;
      const span = make("span", after < 0 ? {class: "prompt"} : {"data-token": after, tabindex: "0"}, piece);
      if (others.has(after)) {
        span.className = "environment";
        span.title = "inserted by the environment: no loss";
        spans.push(span);
      } else if (after >= 0) {
        const show = () => {
          const all = Object.entries(row.numbers).map(([name, values]) => `${name} ${shown(values[after])}`);
          numbers.textContent = `${JSON.stringify(piece)}: ${all.join(", ")}`;
        };
        span.addEventListener("mouseover", show);
        span.addEventListener("focus", show);
        spans.push(span);
      }
      text.append(span);
    });
    paint(spans, row.numbers[colouring].slice(hidden), colouring);
    return make("section", {class: "card sequence"}, make("h3", {}, title), text, numbers);
  };
  // a sequence is drawn inside the one whose history it shares, from where it leaves it
  const episodes = (rows) => {
    const drawn = new Map(), roots = [];
    for (const row of rows) {
      if (row.error) {
        roots.push(make("p", {class: "faint"}, `step ${row.step}: ${row.error}`));
        continue;
      }
      const card = sequence(row);
      drawn.set(`${row.step}/${row.sequence}`, card);
      const parent = row.parent == null ? null : drawn.get(`${row.step}/${row.parent}`);
      if (parent) {
        card.className = "sequence branch";
        parent.append(card);
        parent.closest(".card").classList.add("tree");
      } else roots.push(card);
    }
    return roots;
  };
  const samples = () => {
    for (const run of data.runs) {
      const of = data.runs.length > 1 ? ` · ${run.name}` : "";
      if (run.tokens.length) {
        const choice = make("select", {"aria-label": "colour"}, ...COLOURINGS.map((name) => make("option", name === colouring ? {selected: ""} : {}, name)));
        const grid = make("div", {class: "grid"});
        const fill = () => grid.replaceChildren(...episodes(run.tokens));
        choice.addEventListener("change", () => { colouring = choice.value; fill(); });
        fill();
        page.append(make("h2", {}, `Tokens${of}, coloured by `, choice), grid);
      }
      if (run.samples.length) {
        page.append(make("h2", {}, `Samples${of}`), table(
          ["step", "", "prompt", "response", "answer", "ground truth", "score"],
          run.samples.map((s) => ["", [s.step, s.place, s.prompt, s.response, s.answer, s.ground_truth, shown(s.score)]])));
      }
    }
  };
  const rest = () => {
    for (const run of data.runs) {
      const of = data.runs.length > 1 ? ` · ${run.name}` : "";
      if (run.events.length) {
        page.append(make("h2", {}, `Events${of}`), table(
          ["time (UTC)", "step", "event", ""],
          run.events.map((e) => [e.kind, [e.time.replace("T", " ").replace("+00:00", ""), e.step ?? "", e.kind, e.text]])));
      }
    }
    if (data.runs.length > 1) return;  // their difference is on top
    code("Code", false);
    const rows = data.recipes.map((row) => ["", [row.key, ...row.values]]);
    const box = make("details", {}, make("summary", {}, "Recipe"), rows.length ? table(["key", "value"], rows) : "none");
    page.append(make("h2", {}, "Recipe"), box);
  };

  const build = () => {
    for (const [plot] of plots) plot.destroy();
    plots = [];
    const scrolled = window.scrollY;
    page.replaceChildren();
    header();
    if (data.runs.length > 1) compared();
    drawPlots();
    allMetrics();
    timelines();
    samples();
    rest();
    resize();  // a scroll bar may have appeared
    window.scrollTo(0, scrolled);
  };
  const resize = () => {
    for (const [plot, box] of plots) {
      if (Math.abs(plot.width - box.clientWidth) > 1 && box.clientWidth) plot.setSize({width: box.clientWidth, height: plot.height});
    }
  };
  const refresh = async () => {
    try {
      const answer = await fetch("data.json");
      const text = await answer.text();
      if (answer.ok && text !== refresh.last) {
        refresh.last = text;
        data = JSON.parse(text);
        build();
      }
    } catch (error) {
      // the server has ended: the page keeps what it shows
    }
  };

  build();
  window.addEventListener("resize", resize);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", build);
  if (live) setInterval(refresh, 3000);
  document.documentElement.dataset.ready = Math.round(performance.now());
})();
