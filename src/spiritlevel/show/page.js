"use strict";
(() => {
  const root = document.documentElement;
  const key = (cell) => cell.dataset.sort ?? cell.textContent.trim();

  function compare(a, b) {
    const x = Number(a), y = Number(b);
    const known = [x, y].map((n, i) => !Number.isNaN(n) && [a, b][i] !== "");
    if (known[0] && known[1]) return x - y;
    if (known[0] !== known[1]) return known[0] ? -1 : 1;
    return a.localeCompare(b);
  }

  function sort(table, column, header) {
    const direction = header.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
    const body = table.tBodies[0];
    const missing = (row) => key(row.cells[column]) === "nan";
    const rows = [...body.rows].sort((r, s) =>
      missing(r) - missing(s) || direction * compare(key(r.cells[column]), key(s.cells[column])));
    body.append(...rows);
  }

  for (const table of document.querySelectorAll("table[data-sortable]")) {
    [...table.tHead.rows[0].cells].forEach((header, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...header.childNodes);
      button.addEventListener("click", () => sort(table, column, header));
      header.append(button);
    });
  }

  const controls = document.querySelector(".sl-controls");
  if (controls) {
    const [filter, kind, count] = ["filter", "kind", "count"].map((id) => document.getElementById(id));
    const rows = [...document.querySelectorAll(".sl-summary tbody tr")];
    const apply = () => {
      const wanted = filter.value.trim().toLowerCase();
      for (const row of rows) {
        const named = row.cells[0].textContent.toLowerCase().includes(wanted);
        row.hidden = !named || (kind.value !== "" && row.dataset.kind !== kind.value);
      }
      const shown = rows.filter((row) => !row.hidden).length;
      count.textContent = `${shown} of ${rows.length} shown`;
    };
    filter.addEventListener("input", apply);
    kind.addEventListener("change", apply);
    controls.hidden = false;
    apply();
  }

  for (const box of document.querySelectorAll("[data-searchable]")) {
    const label = document.createElement("label");
    const input = document.createElement("input");
    label.className = "sl-search";
    input.type = "search";
    input.placeholder = "part of a row";
    label.append("Search ", input);
    box.querySelector("h3").after(label);
    input.addEventListener("input", () => {
      const wanted = input.value.trim().toLowerCase();
      for (const row of box.querySelectorAll("tbody tr")) row.hidden = !row.textContent.toLowerCase().includes(wanted);
    });
  }

  const theme = document.getElementById("theme");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const current = () => root.dataset.theme ?? (dark.matches ? "dark" : "light");
  const label = () => { theme.textContent = current() === "dark" ? "Light theme" : "Dark theme"; };
  theme.addEventListener("click", () => { root.dataset.theme = current() === "dark" ? "light" : "dark"; label(); });
  dark.addEventListener("change", label);
  theme.hidden = false;
  label();

  // On paper nobody can open anything. The first picture's numbers are the summary's, once is enough.
  const closed = [];
  addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("main details:not([open])")) { details.open = true; closed.push(details); }
  });
  addEventListener("afterprint", () => { for (const details of closed.splice(0)) details.open = false; });
})();
