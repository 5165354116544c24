"use strict";
(() => {
  const one = (query, from = document) => from.querySelector(query);
  const all = (query, from = document) => [...from.querySelectorAll(query)];
  const make = (tag, properties = {}, ...children) => {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  };
  const many = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

  // Colours: the system's, until the reader says otherwise.
  const root = document.documentElement;
  const dark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const theme = make("button", { id: "theme", type: "button", className: "small" });
  const nameTheme = () => { theme.textContent = dark() ? "Light" : "Dark"; theme.setAttribute("aria-label", `Use ${dark() ? "light" : "dark"} colours`); };
  theme.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; nameTheme(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", nameTheme);
  nameTheme();
  one("header").append(theme);

  if (!one("#data")) return;

  // The cases, back from columns into rows.
  const data = JSON.parse(one("#data").textContent);
  const { texts, numbers, symbols, words, worst_first: worstFirst } = data;
  const rows = numbers.seed.map((_, i) => {
    const row = {};
    for (const name in texts) row[name] = texts[name].values[texts[name].at[i]];
    for (const name in numbers) row[name] = numbers[name][i];
    row.id = [row.op, row.profile, row.shape, row.dtype, row.layout, row.regime, row.seed].join("/");
    row.text = `${row.id} ${row.kernel} ${row.status} ${row.check} ${row.message}`.toLowerCase();
    return row;
  });
  const failing = new Set(["wrong", "error", "crashed", "xpassed"]);

  // The matrix: an op opens into its regimes.
  const opened = (body, open) => { body.classList.toggle("open", open); one("button", body).setAttribute("aria-expanded", open); };
  const bodies = all("#matrix tbody").filter((body) => one(".regime", body));
  for (const body of bodies) {
    const head = one(".op th", body);
    const button = make("button", { type: "button", className: "bare" }, make("span", {}, ...head.childNodes));
    head.append(button);
    button.setAttribute("aria-expanded", "false");
    button.addEventListener("click", () => opened(body, !body.classList.contains("open")));
  }
  const toggleAll = (label, where, isOpen, set) => {
    const button = make("button", { type: "button", className: "small" });
    const show = () => { button.textContent = `${isOpen() ? "Collapse" : "Expand"} all ${label}`; };
    button.addEventListener("click", () => { set(!isOpen()); show(); });
    show();
    one(`${where} .bar`).append(button);
  };
  if (bodies.length) toggleAll("ops", "#matrix", () => bodies.every((b) => b.classList.contains("open")), (open) => bodies.forEach((b) => opened(b, open)));

  // Failures: opened when something leads to them, and commands that can be copied.
  const failures = all("#failures .failure");
  if (failures.length > 1) toggleAll("failures", "#failures", () => failures.every((f) => f.open), (open) => failures.forEach((f) => { f.open = open; }));
  const follow = () => { const target = document.getElementById(location.hash.slice(1)); if (target && "open" in target) { target.open = true; one("summary", target).focus(); } };
  addEventListener("hashchange", follow);
  follow();

  const copy = async (text) => {
    try { await navigator.clipboard.writeText(text); return true; } catch { /* not allowed from this page: the old way */ }
    const area = make("textarea", { value: text });
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  };
  for (const command of all(".command")) {
    const button = make("button", { type: "button", className: "small", textContent: "Copy" });
    button.setAttribute("aria-label", "Copy the command");
    button.addEventListener("click", async () => {
      const done = await copy(one("code", command).textContent);
      button.textContent = done ? "Copied" : "Select it by hand";
      one("#said").textContent = done ? "Command copied" : "The browser does not allow copying";
      button.focus();
      setTimeout(() => { button.textContent = "Copy"; one("#said").textContent = ""; }, 2000);
    });
    command.append(button);
  }

  // Tables that sort: a heading becomes a button.
  const missing = (value) => value === null || value === "";
  const number = (value) => (/^(nan|inf|∞)$/i.test(value) ? Infinity : Number(value));
  const compare = (a, b) => {
    const [x, y] = [number(a), number(b)];
    return Number.isNaN(x) || Number.isNaN(y) ? String(a).localeCompare(String(b)) : x === y ? 0 : x - y;
  };
  const ordered = (found, value, down) => found.sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    return missing(x) || missing(y) ? missing(x) - missing(y) : (down ? -1 : 1) * compare(x, y); // what is missing comes last
  });
  const sortable = (table, apply) => {
    const heads = all("thead th", table);
    heads.forEach((head, place) => {
      const button = make("button", { type: "button", className: "bare", textContent: head.textContent });
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const before = head.getAttribute("aria-sort");
        const down = before ? before === "ascending" : head.classList.contains("n");
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        apply(head, place, down);
      });
    });
  };
  for (const table of all("table.sortable")) {
    const body = one("tbody", table);
    sortable(table, (head, place, down) => {
      const value = (row) => { const cell = row.children[place]; return cell.dataset.value ?? cell.textContent; };
      body.append(...ordered([...body.children], value, down));
    });
  }

  // The table of cases: as many rows as one can read.
  const page = 100;
  let shown = page, matched = rows;
  const duration = (seconds) => {
    for (const [unit, scale] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]]) if (seconds >= scale) return `${Number((seconds / scale).toPrecision(3))} ${unit}`;
    return `${Math.round(seconds * 1e9)} ns`;
  };
  const mark = (state) => make("span", { className: `mark ${state}` }, make("span", { ariaHidden: "true", textContent: symbols[state] }), ` ${words[state]}`);
  const keys = all(".cases th").map((head) => [head.dataset.key, head.classList.contains("n")]);
  const draw = () => {
    const drawn = matched.slice(0, shown).flatMap((row) => {
      const cells = keys.map(([key, isNumber]) => {
        const value = row[key];
        const cell = make("td", { className: isNumber ? "n" : "" });
        cell.append(key === "status" ? mark(value) : value === null ? "" : key === "time" ? duration(value) : String(value));
        return cell;
      });
      const line = make("tr", {}, ...cells);
      if (!row.message) return [line];
      return [line, make("tr", { className: "note" }, make("td", { colSpan: keys.length, textContent: (row.check ? `${row.check}: ` : "") + row.message }))];
    });
    one(".cases tbody").replaceChildren(...drawn);
    one("#results .scroll").hidden = false;
    one("#results .more").hidden = matched.length === 0;
    one("#more").hidden = matched.length <= shown;
    one("#shown").textContent = `${Math.min(shown, matched.length).toLocaleString("en")} of ${many(matched.length, "result")}`;
  };
  sortable(one(".cases"), (head, _, down) => {
    const key = head.dataset.key;
    ordered(rows, (row) => (key === "status" ? worstFirst.indexOf(row.status) : row[key]), down);
    filter();
  });
  one("#more").addEventListener("click", () => { shown += 5 * page; draw(); });

  // The filter.
  const chosen = { op: one("#by-op"), status: one("#by-status"), dtype: one("#by-dtype"), regime: one("#by-regime") };
  const others = all("#matrix .other th").map((head) => head.textContent);
  for (const [name, select] of Object.entries(chosen)) {
    const values = new Set([...texts[name].values, ...(name === "op" ? others : [])]);
    const known = name === "status" ? Object.keys(words).filter((state) => values.has(state)) : [...values].sort();
    select.append(make("option", { value: "", textContent: "all" }));
    select.append(...known.map((value) => make("option", { value, textContent: name === "status" ? `${symbols[value]} ${words[value]}` : value })));
  }
  const filter = () => {
    const wanted = Object.entries(chosen).filter(([, select]) => select.value).map(([name, select]) => [name, select.value]);
    const typed = one("#by-text").value.toLowerCase().split(/\s+/).filter(Boolean);
    const active = wanted.length > 0 || typed.length > 0;
    matched = active ? rows.filter((row) => wanted.every(([name, value]) => row[name] === value) && typed.every((word) => row.text.includes(word))) : rows;
    shown = page;
    const ops = new Set(matched.map((row) => row.op));
    const regimes = new Set(matched.map((row) => `${row.op} ${row.regime}`));
    const names = new Set(matched.map((row) => `${row.id}@${row.kernel}`));
    const onlyOps = wanted.every(([name]) => name === "op");
    for (const op of others) if (onlyOps && (!chosen.op.value || chosen.op.value === op) && typed.every((word) => op.includes(word))) ops.add(op);
    for (const element of all("tbody[data-op], tr[data-op]")) element.hidden = active && !ops.has(element.dataset.op);
    for (const list of all("#others")) { list.open = active && all("tbody", list).some((body) => !body.hidden); }
    for (const body of bodies) for (const row of all(".regime", body)) row.hidden = active && !regimes.has(`${body.dataset.op} ${row.dataset.regime}`);
    for (const cell of all("#matrix [data-dtype]")) cell.hidden = Boolean(chosen.dtype.value && cell.dataset.dtype && cell.dataset.dtype !== chosen.dtype.value);
    for (const failure of all(".failure")) failure.hidden = active && !names.has(failure.dataset.case);
    for (const group of all(".group")) group.hidden = !one(".failure:not([hidden])", group);
    for (const section of all("#expected")) section.hidden = all(".group", section).every((group) => group.hidden);
    const bad = matched.filter((row) => failing.has(row.status)).length;
    one("#failures .none").hidden = !(active && failures.length && failures.every((f) => f.hidden));
    one("#count").textContent = `${active ? `${matched.length.toLocaleString("en")} of ` : ""}${many(rows.length, "result")}, ${many(bad, "failure")}`;
    draw();
  };
  let timer;
  const form = one("#filter");
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(filter, 80); });
  form.addEventListener("reset", () => setTimeout(filter));
  form.hidden = false;
  filter();
})();
