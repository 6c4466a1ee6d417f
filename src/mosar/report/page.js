"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const numbers = (text) => (text ? text.split(" ").map(Number) : []);

  // Theme: the system's, until the button is pressed.
  const root = document.documentElement;
  const remembered = (() => { try { return localStorage.getItem("mosar-theme"); } catch { return null; } })();
  if (remembered) root.dataset.theme = remembered;
  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    try { localStorage.setItem("mosar-theme", root.dataset.theme); } catch { /* a page without storage forgets */ }
  });

  // Tables sort by a column's values; what has none stays at the end.
  for (const table of all("table.sortable")) {
    const heads = all("thead tr:last-child th", table), body = table.tBodies[0];
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const value = (row) => row.cells[column].dataset.sort ?? (head.className === "text" ? row.cells[column].textContent : null);
      const compare = (a, b) => {
        const x = value(a), y = value(b);
        if (x === null || y === null) return (x === null) - (y === null);
        const order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
        return down ? -order : order;
      };
      body.append(...[...body.rows].sort(compare));
    }));
  }

  // Charts: domains and ticks as charts.py has them.
  const nice = (rough) => {
    const power = 10 ** Math.floor(Math.log10(rough));
    return [1, 2, 2.5, 5, 10].map((m) => m * power).find((step) => step >= rough * (1 - 1e-9));
  };
  function ticks(low, high, log) {
    if (log && high / low >= 6) {
      let found = [];
      for (const steps of [[1, 2, 5], [1, 3], [1]]) {
        found = [];
        for (let d = Math.floor(Math.log10(low)); d <= Math.ceil(Math.log10(high)); d++)
          found.push(...steps.map((s) => s * 10 ** d).filter((v) => v >= low && v <= high));
        if (found.length <= 7) break;
      }
      if (found.length >= 3) return found;
    }
    const step = nice((high - low) / 5), found = [];
    for (let i = Math.ceil(low / step - 1e-9); i <= Math.floor(high / step + 1e-9); i++) found.push(i * step);
    return found;
  }
  function tickLabel(value, values, unit) {
    const gaps = values.slice(1).map((v, i) => v - values[i]);
    const step = gaps.length ? Math.min(...gaps) : Math.abs(value) || 1;
    let decimals = 0;
    while (decimals < 9 && Math.abs(+step.toFixed(decimals) - step) > step * 0.01) decimals++;
    let text = Math.abs(value).toFixed(decimals);
    if (Math.abs(value) >= 1e5) text = Math.abs(value).toExponential(0).replace("e+", "e");
    return (value < 0 && Number(text) ? "\u2212" : "") + text + unit;
  }
  function domain(svg, series) {
    if (svg.dataset.domain) return numbers(svg.dataset.domain);
    const log = svg.dataset.scale === "log";
    let values = series.flatMap((s) => [s.dataset.v, s.dataset.lo, s.dataset.hi].flatMap(numbers));
    if (svg.dataset.cap && series.length > 1) {
      const low = values.filter((v) => v <= Number(svg.dataset.cap));
      if (low.length) values = low;
    }
    if (log) values = values.filter((v) => v > 0);
    else if (svg.dataset.line) values.push(Number(svg.dataset.line));
    if (!values.length) return log ? [1, 10] : [0, 1];
    let low = Math.min(...values), high = Math.max(...values);
    if (log) {
      const air = Math.max((Math.log(high) - Math.log(low)) * 0.06, 0.01);
      return [Math.exp(Math.log(low) - air), Math.exp(Math.log(high) + air)];
    }
    if (svg.dataset.zero) low = Math.min(low, 0);
    const air = (high - low || Math.abs(high) * 0.1 || 1) * 0.06;
    return [svg.dataset.zero && low === 0 ? low : low - air, high + air];
  }
  function drawn(svg, name, attributes) {
    const made = document.createElementNS(svg.namespaceURI, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  }
  const visible = (svg) => all(".series:not(.off)", svg);
  function rescale(svg) {
    const shown = visible(svg);
    if (!shown.length) return;
    const [left, top, width, height] = numbers(svg.dataset.box);
    const [low, high] = domain(svg, shown), log = svg.dataset.scale === "log";
    const f = log ? Math.log : (v) => v;
    const y = (v) => top + (1 - (f(v) - f(low)) / (f(high) - f(low))) * height;
    const path = (xs, ys) => "M" + xs.map((x, i) => `${x.toFixed(1)} ${ys[i].toFixed(1)}`).join("L");
    for (const series of shown) {
      const xs = numbers(series.dataset.px), ys = numbers(series.dataset.v).map(y);
      series.querySelector(".line").setAttribute("d", path(xs, ys));
      const band = series.querySelector(".band");
      if (band) {
        const up = numbers(series.dataset.hi).map(y), down = numbers(series.dataset.lo).map(y).reverse();
        band.setAttribute("d", path([...xs, ...[...xs].reverse()], [...up, ...down]) + "Z");
      }
      all(".dot", series).forEach((dot, i) => dot.setAttribute("transform", `translate(${xs[i].toFixed(1)} ${ys[i].toFixed(1)})`));
    }
    const values = ticks(low, high, log);
    svg.querySelector(".yaxis").replaceChildren(...values.flatMap((v) => {
      const at = y(v).toFixed(1), label = drawn(svg, "text", { x: left - 7, y: (y(v) + 4).toFixed(1) });
      label.textContent = tickLabel(v, values, svg.dataset.unit ?? "");
      return [drawn(svg, "line", { x1: left, x2: left + width, y1: at, y2: at }), label];
    }));
    const level = svg.querySelector(".level");
    if (level) for (const end of ["y1", "y2"]) level.setAttribute(end, y(Number(svg.dataset.line)).toFixed(1));
  }

  // The legend switches a series off in every chart.
  const charts = all(".plot > svg[data-box]"), chips = all(".chip"), hidden = new Set();
  const showAll = document.getElementById("all");
  function apply() {
    for (const chip of chips) chip.setAttribute("aria-pressed", String(!hidden.has(chip.dataset.key)));
    for (const svg of charts) {
      for (const series of all(".series", svg))
        series.classList.toggle("off", hidden.has(series.dataset.key) || hidden.has("note:" + series.dataset.note));
      rescale(svg);
    }
    showAll.hidden = !hidden.size;
  }
  for (const chip of chips) chip.addEventListener("click", () => {
    if (!hidden.delete(chip.dataset.key)) hidden.add(chip.dataset.key);
    apply();
  });
  showAll.addEventListener("click", () => { hidden.clear(); apply(); });

  // Tooltips: everything at the nearest place, with the mouse, a finger or the arrow keys.
  const tip = document.getElementById("tip");
  function showTip(x, y) {
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(8, Math.min(x + 16, innerWidth - box.width - 8)) + "px";
    tip.style.top = (y + 20 + box.height > innerHeight ? Math.max(8, y - box.height - 14) : y + 20) + "px";
  }
  function element(name, text) {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    return made;
  }
  function read(svg, stop, x, y) {
    const [place, label] = stop, rows = [];
    for (const series of visible(svg)) {
      const at = numbers(series.dataset.px).findIndex((px) => Math.abs(px - place) < 0.6);
      if (at >= 0) rows.push([numbers(series.dataset.v)[at], series, series.dataset.t.split("|")[at]]);
    }
    if (!rows.length) return;
    rows.sort((a, b) => b[0] - a[0]);
    const table = element("table");
    for (const [, series, text] of rows) {
      const row = table.insertRow(), name = row.insertCell(), dot = element("i");
      dot.style.cssText = series.style.cssText;
      name.append(dot, series.dataset.label);
      row.insertCell().textContent = text;
    }
    tip.replaceChildren(element("b", `${svg.dataset.xlabel.split(":")[0]} ${label}`), table);
    const cursor = svg.querySelector(".cursor");
    cursor.setAttribute("x1", place);
    cursor.setAttribute("x2", place);
    cursor.setAttribute("visibility", "visible");
    showTip(x, y);
  }
  for (const svg of charts) {
    const stops = JSON.parse(svg.dataset.stops), plot = svg.parentElement, cursor = svg.querySelector(".cursor");
    let at = -1;
    const leave = () => { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); at = -1; };
    plot.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect(), x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
      at = stops.reduce((best, stop, i) => (Math.abs(stop[0] - x) < Math.abs(stops[best][0] - x) ? i : best), 0);
      read(svg, stops[at], event.clientX, event.clientY);
    });
    plot.addEventListener("pointerleave", leave);
    plot.addEventListener("blur", leave);
    plot.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") leave();
      if (!step) return;
      event.preventDefault();
      at = Math.max(0, Math.min(stops.length - 1, at + step));
      const box = svg.getBoundingClientRect(), scale = box.width / svg.viewBox.baseVal.width;
      read(svg, stops[at], box.left + stops[at][0] * scale, box.top + box.height / 3);
    });
  }
  for (const part of all("[data-tip]")) {
    part.addEventListener("pointermove", (event) => {
      const [title, ...lines] = part.dataset.tip.split("|");
      tip.replaceChildren(element("b", title), ...lines.map((line) => element("div", line)));
      showTip(event.clientX, event.clientY);
    });
    part.addEventListener("pointerleave", () => { tip.hidden = true; });
  }

  // One figure of several.
  for (const box of all(".switch")) {
    const select = box.querySelector("select");
    if (select) select.addEventListener("change", () => {
      for (const panel of all("[data-panel]", box)) panel.hidden = panel.dataset.panel !== select.value;
    });
  }

  // Verdicts: show those that are switched on.
  const filters = all("button[data-verdict]");
  for (const filter of filters) filter.addEventListener("click", () => {
    filter.setAttribute("aria-pressed", String(filter.getAttribute("aria-pressed") !== "true"));
    const on = filters.filter((f) => f.getAttribute("aria-pressed") === "true").map((f) => f.dataset.verdict);
    let group = null, any = false;
    const close = () => { if (group) group.hidden = !any; };
    for (const row of all(".claims tbody tr")) {
      if (row.className === "group") { close(); group = row; any = false; continue; }
      row.hidden = !on.includes(row.dataset.verdict);
      any ||= !row.hidden;
    }
    close();
  });

  // The menu shows where the reader is.
  const links = new Map(all(".bar nav a").map((link) => [link.hash.slice(1), link]));
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) links.get(entry.target.id)?.classList.toggle("here", entry.isIntersecting);
  }, { rootMargin: "-30% 0px -65% 0px" });
  for (const section of all("main > section[id]")) watcher.observe(section);
})();
