"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const numbers = (text) => (text ? text.split(" ").map(Number) : []);

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
      // Families end where all rows are ranked.
      all("tr.group", body).forEach((row) => row.remove());
      body.append(...[...body.rows].sort(compare));
    }));
  }

  // Charts: what moves with the scale carries its places in the picture as Python drew it.
  const visible = (svg) => all(".moves:not(.off)", svg);
  const path = (xs, ys) => "M" + xs.map((x, i) => `${x} ${ys[i].toFixed(1)}`).join("L");
  function rescale(svg) {
    const lines = visible(svg), { cap, base } = svg.dataset, [, top, , height] = numbers(svg.dataset.box);
    if (!svg.dataset.ticks || !lines.some((line) => line.matches(".series"))) return;
    const of = (selector) => lines.filter((line) => line.matches(selector)).flatMap((line) => numbers(line.dataset.y));
    let ys = of("[data-key]");
    const inside = ys.filter((y) => y >= Number(cap));
    if (cap && 4 * inside.length >= ys.length && lines.filter((line) => line.matches(".series")).length > 1) ys = inside;
    ys.push(...of(".level"), ...(base ? [Number(base)] : []));
    let high = Math.min(...ys), low = Math.max(...ys);
    const air = (low - high || height / 10) * 0.06;
    high -= air;
    if (low !== Number(base)) low += air;
    const whole = !all(".off", svg).length;
    const move = (y) => (whole ? y : top + ((y - high) / (low - high)) * height);
    for (const line of lines) {
      const xs = numbers(line.dataset.x), moved = numbers(line.dataset.y).map(move);
      line.querySelector(":scope > path")?.setAttribute("d", path(xs, moved));
      const dot = line.querySelector("use");
      dot?.parentNode.replaceChildren(...xs.map((x, i) => {
        const made = dot.cloneNode();
        made.setAttribute("x", x);
        made.setAttribute("y", moved[i].toFixed(1));
        return made;
      }));
    }
    // The first level with four ticks in view, as in drawing.py.
    const shown = (level) => level.filter(([y]) => move(y) >= top - 0.1 && move(y) <= top + height + 0.1);
    const levels = JSON.parse(svg.dataset.ticks).map(shown);
    const level = levels.find((ticks) => ticks.length >= 4) ?? levels.at(-1);
    const axis = svg.querySelector(".y-axis"), old = all(".tick", svg);
    axis.model ??= old[0].cloneNode(true);
    const start = Number(axis.model.querySelector("path").getAttribute("d").split(" ")[2]);
    axis.prepend(...level.map(([y, label]) => {
      const made = axis.model.cloneNode(true);
      made.setAttribute("transform", `translate(0 ${(move(y) - start).toFixed(1)})`);
      made.querySelector("text").textContent = label;
      return made;
    }));
    old.forEach((tick) => tick.remove());
  }

  // The legend switches a series off in every chart.
  // Of many variants a few are shown at first; the others are one click away.
  const few = document.querySelector("main").dataset.hidden?.split(" ") ?? [];
  const charts = all("svg[data-box]"), chips = all(".chip"), hidden = new Set(few);
  const showAll = document.getElementById("all");
  function apply() {
    for (const chip of chips) chip.setAttribute("aria-pressed", String(!hidden.has(chip.dataset.key)));
    for (const svg of charts) {
      for (const part of all(".moves[data-key]", svg))
        part.classList.toggle("off", hidden.has(part.dataset.key) || hidden.has("note:" + part.dataset.note));
      rescale(svg);
    }
    showAll.hidden = !hidden.size && !few.length;
    showAll.textContent = hidden.size ? "Show all" : "Show a few";
  }
  for (const chip of chips) chip.addEventListener("click", () => {
    if (!hidden.delete(chip.dataset.key)) hidden.add(chip.dataset.key);
    apply();
  });
  showAll.addEventListener("click", () => {
    const shown = hidden.size > 0;
    hidden.clear();
    if (!shown) few.forEach((key) => hidden.add(key));
    apply();
  });
  for (const button of all(".expand")) button.addEventListener("click", () => {
    const open = button.parentElement.classList.toggle("open");
    button.setAttribute("aria-expanded", String(open));
  });
  if (few.length) apply();

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
    for (const series of visible(svg).filter((part) => part.matches(".series"))) {
      const at = numbers(series.dataset.x).findIndex((px) => Math.abs(px - place) < 0.2);
      if (at >= 0) rows.push([numbers(series.dataset.y)[at], series, series.dataset.t.split("|")[at]]);
    }
    if (!rows.length) return;
    rows.sort((a, b) => a[0] - b[0]);
    const table = element("table");
    for (const [, series, text] of rows) {
      const row = table.insertRow(), name = row.insertCell(), dot = element("i");
      dot.style.cssText = series.style.cssText;
      name.append(dot, series.dataset.label);
      row.insertCell().textContent = text;
    }
    tip.replaceChildren(element("b", `${svg.dataset.xlabel.split(":")[0]} ${label}`), table);
    svg.lastElementChild.setAttribute("d", cursor(svg, place));
    showTip(x, y);
  }
  function cursor(svg, x) {
    const [, top, , height] = numbers(svg.dataset.box);
    return `M${x} ${top}v${height}`;
  }
  for (const svg of charts) {
    const stops = JSON.parse(svg.dataset.stops), plot = svg.parentElement;
    let at = -1;
    svg.append(document.createElementNS(svg.namespaceURI, "path"));
    svg.lastElementChild.setAttribute("class", "cursor");
    const leave = () => { tip.hidden = true; svg.lastElementChild.removeAttribute("d"); at = -1; };
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
