"use strict";
(async () => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { pieces, regimes, sinks, layers: L, groups: G, length: T } = data;
  // null is boundless.
  const reach = data.reach.map((row) => row.map((most) => most ?? Infinity)), windows = data.windows.map((most) => most ?? Infinity);
  const $ = (id) => document.getElementById(id);
  const element = (name, text, className) => {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  };
  // Unpacked as microscope/page.py packs it.
  async function unpack(base64) {
    const bytes = Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }
  const { packed } = data, N = L * G * T;
  const labels = await unpack(packed.labels), roots = await unpack(packed.outside);
  const sides = await Promise.all([packed.inside_entries, packed.outside_entries].map((parts) => Promise.all(parts.map(unpack))));
  const row = (l, g, i) => (l * G + g) * T + i;
  const label = (l, role, g, i) => labels[((l * 2 + role) * G + g) * T + i];
  const outside = (l, g, i) => {
    const at = 2 * row(l, g, i);
    return ((roots[at] + 256 * roots[at + 1]) / 65535) ** 2;
  };
  const state = { role: 0, layer: -1, group: -1, token: -1 }, counts = { role: 2, layer: L, group: G, token: T };
  const chosenLayers = () => (state.layer < 0 ? [...Array(L).keys()] : [state.layer]);
  const chosenGroups = () => (state.group < 0 ? [...Array(G).keys()] : [state.group]);
  const mean = (f) => {
    let sum = 0, count = 0;
    for (const l of chosenLayers()) for (const g of chosenGroups()) { sum += f(l, g); count += 1; }
    return sum / count;
  };
  const percent = (share) => { const value = 100 * share; return value.toFixed(value >= 10 ? 0 : value >= 1 ? 1 : 2) + " %"; };
  const [whole, fine] = [0, 1].map((digits) => new Intl.NumberFormat("en", { maximumFractionDigits: digits }));
  const number = (value) => (value < 100 ? fine : whole).format(value);

  // What has no shape of its own, or would change that of its neighbours, is shown by a sign.
  const HIDDEN = /[\u0000-\u001f\u007f-\u00a0\u00ad\u061c\u180e\u2000-\u200f\u2028-\u202f\u205f-\u206f\u3000\ufeff\u{e0000}-\u{e007f}]/u;
  // These change the character before them; a token of nothing else would have no width.
  const SELECTORS = /^[\u180b-\u180f\ufe00-\ufe0f\u{e0100}-\u{e01ef}]+$/u;
  function sign(c) {
    const code = c.codePointAt(0);
    if (c === "\n") return "↵";
    if (c === "\t") return "→";
    if (code < 0x20) return String.fromCodePoint(0x2400 + code);
    return `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  }
  const isHidden = (c, piece) => HIDDEN.test(c) || SELECTORS.test(piece);
  const readable = (piece) => [...piece].map((c) => (c === " " ? "␣" : isHidden(c, piece) ? sign(c) : c)).join("") || "▯";
  function fill(span, piece) {
    if (!piece) { span.className = "part"; return; }
    let plain = "";
    const flush = () => { if (plain) span.append(plain); plain = ""; };
    for (const c of piece) {
      if (!isHidden(c, piece)) { plain += c; continue; }
      flush();
      span.append(element("s", sign(c)));
      if (c === "\n" || c === "\t") plain += c;
    }
    flush();
  }
  const text = $("text"), spans = pieces.map((piece, i) => {
    const span = element("span");
    span.dataset.i = i;
    fill(span, piece);
    return span;
  });
  // Letters of such scripts join their neighbours, also those of the next token; page.css adds the joiner.
  const JOINS = /^[\p{Script=Arabic}\p{Script=Syriac}\p{Script=Nko}\p{Script=Mongolian}]$/u;
  let before = -1;
  for (const [i, piece] of pieces.entries()) {
    if (!piece) continue;
    if (before >= 0 && JOINS.test([...pieces[before]].at(-1)) && JOINS.test([...piece][0])) {
      spans[before].classList.add("joins");
      spans[i].classList.add("joined");
    }
    before = i;
  }
  // Blocks end with lines: the browser lays out and paints only those in view.
  const blocks = [];
  for (const [i, span] of spans.entries()) {
    if (!blocks.length || (blocks.at(-1).childElementCount >= 64 && pieces[i - 1].endsWith("\n"))) blocks.push(element("div"));
    blocks.at(-1).append(span);
  }
  text.replaceChildren(...blocks);

  // Colours run along the regimes, from the shortest reach to the global one.
  const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  const shades = regimes.map((regime) => [channels(regime.light), channels(regime.dark)]);
  function mixed(place, dark) {
    const low = Math.min(Math.floor(place), regimes.length - 2), part = place - low;
    return shades[low][dark].map((c, k) => Math.round(c + (shades[low + 1][dark][k] - c) * part));
  }
  function paint(target, place) {
    for (const [dark, name] of ["--l", "--d"].entries()) target.style.setProperty(name, `rgb(${mixed(place, dark).join(" ")})`);
  }
  function regimeChip(kind, place, name) {
    const made = element(kind, name);
    paint(made, place);
    return made;
  }
  for (const id of ["legend", "map-legend"]) $(id).append(...regimes.map((regime, m) => {
    const key = element("span", undefined, "key");
    paint(key, m);
    const name = regime.name === String(regime.reach) ? "" : `${regime.name}: `;
    key.append(element("i"), m === regimes.length - 1 ? `${name}all, among themselves` : `${name}reach ${number(regime.reach)}`);
    return key;
  }));
  $("map-layers").append(...Array.from({ length: L }, (_, l) => element("li", `layer ${l}`)));

  const option = (value, name) => { const made = element("option", name); made.value = value; return made; };
  for (const [id, count] of [["layer", L], ["group", G]]) {
    $(id).append(option(-1, "all"), ...Array.from({ length: count }, (_, i) => option(i, String(i))));
    $(id).addEventListener("change", () => { state[id] = Number($(id).value); draw(); });
  }
  $("group-choice").hidden = G === 1;
  const roles = [...document.querySelectorAll("[data-role]")];
  for (const button of roles) button.addEventListener("click", () => { state.role = Number(button.dataset.role); draw(); });

  // A browser pays for every style that is set: only those that change are.
  const painted = new Float64Array(T).fill(-1), opacity = new Uint8Array(T).fill(255);
  function shade() {
    const sums = new Float64Array(T), chosen = chosenLayers().flatMap((l) => chosenGroups().map((g) => ((l * 2 + state.role) * G + g) * T));
    for (const start of chosen) for (let i = 0; i < T; i += 1) sums[i] += labels[start + i];
    for (const [i, span] of spans.entries()) {
      const place = sums[i] / chosen.length;
      if (place !== painted[i]) paint(span, (painted[i] = place));
    }
  }
  /** Of token i: how many keys it may read in each (layer, group), and the share of those chosen that read each key. */
  function support(i) {
    const counts = new Float64Array(L * G), share = new Float64Array(T), layers = new Set(chosenLayers()), groups = new Set(chosenGroups());
    const weight = 1 / (layers.size * groups.size);
    for (let l = 0; l < L; l += 1) for (let g = 0; g < G; g += 1) {
      const most = reach[label(l, 0, g, i)], start = ((l * 2 + 1) * G + g) * T, chosen = layers.has(l) && groups.has(g);
      for (let j = Math.max(0, i - windows[l]); j <= i; j += 1) {
        if (i - j > most[j < sinks ? regimes.length : labels[start + j]]) continue;
        counts[l * G + g] += 1;
        if (chosen) share[j] += weight;
      }
    }
    return { counts, share };
  }
  /** The largest shares of token i on one side, summed over what is chosen: [key, share], falling. */
  function entries(side, i) {
    const found = new Map(), rows = chosenLayers().length * chosenGroups().length;
    for (const l of chosenLayers()) for (const g of chosenGroups()) for (const entry of sides[side]) {
      const at = row(l, g, i), share = (entry[2 * N + at] / 255) ** 2, key = i - entry[at] - 256 * entry[N + at];
      if (share) found.set(key, (found.get(key) ?? 0) + share / rows);
    }
    return [...found].sort((a, b) => b[1] - a[1] || a[0] - b[0]).slice(0, side ? 6 : 12);
  }
  let seen = null, marked = [];
  function highlight(j, name) { spans[j].classList.add(name); marked.push(spans[j]); }
  function mark() {
    const i = state.token;
    seen = i < 0 ? null : support(i);
    text.classList.toggle("chosen", i >= 0);
    for (const span of marked) span.classList.remove("here", "reads", "drops");
    marked = [];
    if (i < 0) return;
    for (const [j, span] of spans.entries()) {
      const percent = Math.round(22 + 78 * seen.share[j]);
      if (percent !== opacity[j]) span.style.setProperty("--o", `${(opacity[j] = percent)}%`);
    }
    highlight(i, "here");
    for (const [j, share] of entries(0, i)) if (j !== i) {
      highlight(j, "reads");
      spans[j].style.setProperty("--w", `${Math.min(6, 1 + 12 * share).toFixed(1)}px`);
    }
    for (const [j, share] of entries(1, i)) if (share > 0.001) highlight(j, "drops");
  }

  function fact(list, name, value, id) {
    const cell = element("dd", value);
    if (id) cell.dataset.fact = id;
    list.append(element("dt", name), cell);
  }
  function entryList(side, i) {
    const list = element("div", undefined, "entries");
    list.dataset.side = side ? "outside" : "inside";
    for (const [j, share] of entries(side, i)) {
      const button = element("button"), bar = element("em", percent(share));
      button.type = "button";
      button.dataset.key = j;
      bar.style.setProperty("--p", `${Math.min(100, 100 * share)}%`);
      button.append(element("b", readable(pieces[j])), element("small", i === j ? "itself" : `${number(i - j)} back`), bar);
      button.addEventListener("click", () => choose(j));
      list.append(button);
    }
    if (!list.childElementCount) list.append(element("p", "none that is large enough to be stored", "note"));
    return list;
  }
  function describe() {
    const i = state.token, panel = $("token");
    if (i < 0) {
      panel.replaceChildren(element("h3", "No token chosen"), element("p", "Click a token in the text or in the map. The arrow keys move to the next one."));
      return;
    }
    const where = `${state.layer < 0 ? "all layers" : `layer ${state.layer}`}${G === 1 ? "" : state.group < 0 ? ", all groups" : `, group ${state.group}`}`;
    const facts = element("dl", undefined, "facts");
    fact(facts, "keys it may read", number(mean((l, g) => seen.counts[l * G + g])), "reads");
    fact(facts, "keys before it, and itself", number(i + 1));
    fact(facts, "attention inside its support", percent(1 - mean((l, g) => outside(l, g, i))), "inside");
    fact(facts, "attention outside", percent(mean((l, g) => outside(l, g, i))), "outside");
    const table = element("table", undefined, "by-layer"), head = table.createTHead().insertRow();
    for (const name of ["layer", "query", "key", "reads", "outside"]) head.append(element("th", name));
    const body = table.createTBody(), all = [...Array(G).keys()];
    for (let l = 0; l < L; l += 1) {
      const line = body.insertRow();
      line.classList.toggle("now", l === state.layer);
      line.append(element("td", String(l)));
      for (const role of [0, 1]) {
        const cells = element("div", undefined, "cells");
        cells.append(...all.map((g) => regimeChip("i", label(l, role, g, i), regimes[label(l, role, g, i)].name)));
        line.insertCell().append(cells);
      }
      const average = (f) => all.reduce((sum, g) => sum + f(g), 0) / G;
      line.append(element("td", number(average((g) => seen.counts[l * G + g]))), element("td", percent(average((g) => outside(l, g, i)))));
      line.addEventListener("click", () => { state.layer = l === state.layer ? -1 : l; draw(); });
    }
    panel.replaceChildren(
      element("h3", readable(pieces[i])), element("p", `position ${i}, token ${data.tokens[i]}; ${where}`, "muted"), facts,
      element("h4", "It attends most to"), entryList(0, i),
      element("h4", "Largest shares outside of its support"), entryList(1, i),
      element("h4", "Its choices in each layer"), table,
    );
  }

  // The map.
  const canvas = $("map").querySelector("canvas"), cross = $("cross"), rows = L * G;
  const dark = () => Number(getComputedStyle(document.documentElement).colorScheme === "dark" || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches));
  function drawMap() {
    // Whole pixels down, so that rows stay apart when positions are squeezed; a line between layers.
    const height = Math.max(4, Math.min(30, Math.round(400 / rows)));
    canvas.width = T; canvas.height = rows * height;
    canvas.classList.toggle("many", T > 1600);
    canvas.style.height = `${canvas.height}px`;
    const context = canvas.getContext("2d"), image = context.createImageData(T, canvas.height), shown = dark();
    const colours = regimes.map((_, m) => mixed(m, shown));
    const pixels = new Uint32Array(image.data.buffer), packedColours = colours.map(([r, g, b]) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0);
    for (let r = 0; r < rows; r += 1) {
      const last = G > 1 && r % G === G - 1, first = r * height * T;
      for (let i = 0; i < T; i += 1) pixels[first + i] = packedColours[label(Math.floor(r / G), state.role, r % G, i)];
      for (let y = 1; y < height - last; y += 1) pixels.copyWithin(first + y * T, first, first + T);
    }
    context.putImageData(image, 0, 0);
  }
  function drawCross() {
    cross.hidden = state.token < 0;
    if (cross.hidden) return;
    const first = state.layer < 0 ? 0 : state.layer * G + Math.max(0, state.group), count = state.layer < 0 ? rows : state.group < 0 ? G : 1;
    cross.style.left = `calc(${(100 * state.token) / T}% - 2px)`;
    cross.style.width = `calc(${100 / T}% + 4px)`;
    cross.style.top = `${(100 * first) / rows}%`;
    cross.style.height = `${(100 * count) / rows}%`;
  }
  function under(event) {
    const box = canvas.getBoundingClientRect(), inside = (value, most) => Math.max(0, Math.min(most - 1, Math.floor(value * most)));
    return [inside((event.clientX - box.left) / box.width, T), inside((event.clientY - box.top) / box.height, rows)];
  }
  const tip = $("tip");
  let hovered = null;
  function leave() { tip.hidden = true; hovered?.classList.remove("hover"); hovered = null; }
  canvas.addEventListener("pointermove", (event) => {
    const [i, r] = under(event), l = Math.floor(r / G), g = r % G;
    leave();
    hovered = spans[i];
    hovered.classList.add("hover");
    tip.replaceChildren(element("b", readable(pieces[i])), `position ${i}, layer ${l}${G > 1 ? `, group ${g}` : ""}: ${regimes[label(l, state.role, g, i)].name} as ${["query", "key"][state.role]}`);
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(event.clientX + 14, innerWidth - box.width - 8))}px`;
    tip.style.top = `${event.clientY + 24 + box.height > innerHeight ? event.clientY - box.height - 12 : event.clientY + 18}px`;
  });
  canvas.addEventListener("pointerleave", leave);
  canvas.addEventListener("click", (event) => {
    const [i, r] = under(event);
    state.layer = Math.floor(r / G);
    if (G > 1) state.group = r % G;
    choose(i);
  });

  function draw() {
    $("layer").value = state.layer;
    $("group").value = state.group;
    for (const button of roles) button.setAttribute("aria-pressed", String(Number(button.dataset.role) === state.role));
    shade(); mark(); describe(); drawMap(); drawCross();
    remember();
    $("map-note").textContent = `What each token chose as ${["a query", "a key"][state.role]}: ${rows} rows of ${number(T)} token${T === 1 ? "" : "s"}.`;
  }
  function choose(i) {
    state.token = i;
    mark(); describe(); drawCross(); remember();
    $("layer").value = state.layer;
    $("group").value = state.group;
    reveal(3);
  }
  /** Scrolls to the token. A block gets its true height when it comes into view, so this is tried again. */
  function reveal(tries) {
    if (state.token < 0 || !tries) return;
    const box = text.getBoundingClientRect(), at = spans[state.token].getBoundingClientRect();
    if (at.top >= box.top && at.bottom <= box.bottom) return;
    text.scrollTop += at.top - box.top - box.height / 2;
    requestAnimationFrame(() => reveal(tries - 1));
  }
  text.addEventListener("click", (event) => {
    const span = event.target.closest("[data-i]");
    if (span && !String(getSelection())) choose(Number(span.dataset.i));
  });
  /** The token above or below, nearest to the same column. */
  function vertical(i, down) {
    const from = spans[i].getBoundingClientRect(), step = down ? 1 : -1;
    let best = i, line = null, off = Infinity;
    for (let j = i + step; j >= 0 && j < T; j += step) {
      const at = spans[j].getBoundingClientRect();
      if (Math.abs(at.top - from.top) < from.height / 2) continue;
      if (line !== null && Math.abs(at.top - line) > from.height / 2) break;
      line = at.top;
      if (Math.abs(at.left - from.left) < off) { off = Math.abs(at.left - from.left); best = j; }
    }
    return best;
  }
  const within = (i) => Math.max(0, Math.min(T - 1, i));
  function keys(event, others) {
    const i = state.token, move = { ArrowLeft: i - 1, ArrowRight: i + 1, Home: 0, End: T - 1 };
    if (event.key === "Escape") choose(-1);
    else if (event.key in move) choose(within(move[event.key]));
    else if (!others(event.key, Math.max(i, 0))) return;
    event.preventDefault();
  }
  text.addEventListener("keydown", (event) => keys(event, (key, i) => {
    if (key !== "ArrowUp" && key !== "ArrowDown") return false;
    choose(state.token < 0 ? 0 : vertical(i, key === "ArrowDown"));
    return true;
  }));
  $("map").addEventListener("keydown", (event) => keys(event, (key) => {
    const step = { ArrowUp: -1, ArrowDown: 1 }[key];
    if (!step) return false;
    const now = state.layer < 0 ? (step > 0 ? -1 : rows) : state.layer * G + Math.max(0, state.group);
    const next = Math.max(0, Math.min(rows - 1, now + step));
    state.layer = Math.floor(next / G);
    if (G > 1) state.group = next % G;
    draw();
    return true;
  }));

  // Who is global.
  const titles = { far: "most global", near: "most local" };
  for (const [role, ranking] of Object.entries(data.rankings)) {
    const card = element("div", undefined, "card ranking");
    card.append(element("h3", role === "query" ? "As queries" : "As keys"));
    for (const [what, name] of [["pieces", "Parts of words"], ["positions", "Positions"]]) {
      const pair = element("div", undefined, "pair");
      for (const side of ["far", "near"]) {
        const table = element("table"), head = table.createTHead().insertRow(), body = table.createTBody();
        for (const title of ["token", what === "pieces" ? "count" : "position", regimes.at(-1).name, "reach"]) head.append(element("th", title));
        for (const chooser of ranking[`${side}_${what}`]) {
          const line = body.insertRow(), button = element("button", readable(chooser.piece)), cell = element("th");
          button.type = "button";
          cell.append(button);
          line.append(cell, ...[number(what === "pieces" ? chooser.count : chooser.position), percent(chooser.far), percent(chooser.reach)].map((value) => element("td", value)));
          line.addEventListener("click", () => { choose(chooser.position); $("reading").scrollIntoView(); });
        }
        const block = element("div"), none = element("p", `None chose ${regimes.at(-1).name}.`, "note");
        block.append(element("h4", `${name}, ${titles[side]}`), body.rows.length ? table : none);
        pair.append(block);
      }
      card.append(pair);
    }
    $("rankings").append(card);
  }

  // What it saves.
  function svg(name, attributes, text) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  }
  function curve(id, values) {
    const { places } = data.savings, width = 560, height = 240, left = 52, bottom = 30;
    const last = Math.max(places.at(-1), 2), top = Math.max(last, ...values);
    const x = (place) => left + ((place - 1) / (last - 1)) * (width - left - 12), y = (value) => height - bottom - (value / top) * (height - bottom - 12);
    const path = (ys) => "M" + places.map((place, k) => `${x(place).toFixed(1)} ${y(ys[k]).toFixed(1)}`).join("L");
    const drawn = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${id}: ${number(values.at(-1))} of ${number(places.at(-1))} at the end` });
    for (const part of T > 2 ? [0, 0.5, 1] : [0, 1]) {
      drawn.append(svg("path", { d: `M${left} ${y(part * top)}H${width - 12}`, class: "dense", "stroke-opacity": 0.4 }));
      drawn.append(svg("text", { x: left - 6, y: y(part * top) + 4, "text-anchor": "end" }, number(Math.round(part * top))));
      drawn.append(svg("text", { x: x(1 + part * (last - 1)), y: height - 8, "text-anchor": part === 1 ? "end" : "middle" }, number(Math.round(1 + part * (last - 1)))));
    }
    drawn.append(svg("path", { d: path(places), class: "dense" }), svg("path", { d: path(values), class: "curve" }));
    drawn.append(svg("text", { x: x(last) - 4, y: y(values.at(-1)) - 8, "text-anchor": "end" }, number(values.at(-1))));
    $(id).append(drawn);
  }
  curve("reads", data.savings.reads);
  curve("alive", data.savings.alive);
  const { layer_reads: reads, layer_alive: alive, layer_outside: left } = data.savings;
  for (const l of alive.map((_, l) => l).sort((a, b) => alive[b] - alive[a] || a - b)) {
    const line = $("layers").tBodies[0].insertRow();
    line.append(element("th", `layer ${l}`));
    for (const share of [reads[l], alive[l], left[l]]) {
      const cell = element("td", percent(share));
      cell.style.setProperty("--p", `${100 * share}%`);
      line.append(cell);
    }
  }
  $("theme").addEventListener("click", drawMap);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawMap);

  // The address holds the view: #reading?token=326&layer=0 opens the page at that section and token. With `alone` it
  // shows no other section.
  const sections = [...document.querySelectorAll("main > section")];
  let section = "", alone = false;
  function restore() {
    const [name, asked] = location.hash.slice(1).split("?"), given = new URLSearchParams(asked), shown = sections.find((part) => part.id === name);
    section = shown ? name : "";
    alone = Boolean(shown) && given.has("alone");
    for (const part of sections) part.hidden = alone && part !== shown;
    // A link to a section alone keeps what is chosen.
    if (asked !== undefined) for (const [key, count] of Object.entries(counts)) {
      const text = given.get(key) ?? "", value = Number(text);
      state[key] = /^\d+$/.test(text) && value < count ? value : key === "role" ? 0 : -1;
    }
    draw();
    if (shown) shown.scrollIntoView({ behavior: "instant" });
    choose(state.token);
  }
  function remember() {
    if (!document.documentElement.dataset.ready) return;
    const view = new URLSearchParams(Object.entries(state).filter(([, value]) => value >= 0));
    // A page inside of another one, as in a notebook, has no address of its own.
    try { history.replaceState(null, "", `#${section || "reading"}?${alone ? "alone&" : ""}${view}`); } catch { /* the view is not remembered */ }
  }
  addEventListener("hashchange", restore);
  restore();
  document.documentElement.dataset.ready = "true";
})();
