/** Save tables as CSV and LaTeX, and figures as PNG and SVG, from within the page. */

import type { Cell, Table } from "./data";
import { visibleLine } from "./text";

const LATEX: Record<string, string> = {
  "\\": "\\textbackslash{}",
  "~": "\\textasciitilde{}",
  "^": "\\textasciicircum{}",
  "±": "$\\pm$",
  "−": "$-$",
  "×": "$\\times$",
  "–": "--",
  ...Object.fromEntries([..."&%$#_{}"].map((character) => [character, `\\${character}`])),
};

export function asCsv(table: Table): string {
  const spreads = table.columns.map((_, i) => table.rows.some((row) => row[i]?.s !== undefined));
  const headings = table.columns.flatMap((name, i) => (spreads[i] ? [name, `${name}, ±`] : [name]));
  const rows = table.rows.map((row) =>
    row.flatMap((cell, i) =>
      spreads[i] ? [csvCell(cell), csvCell({ t: "", v: cell.s ?? null })] : [csvCell(cell)],
    ),
  );
  const lines = [headings.map(quoted), ...rows];
  return `${lines.map((cells) => cells.join(",")).join("\n")}\n`;
}

function csvCell(cell: Cell): string {
  if (cell.v === null) return "";
  if (typeof cell.v === "number") return String(cell.v);
  const text = visibleLine(cell.v);
  return quoted(/^[=+\-@]/.test(text) ? `'${text}` : text); // no cell becomes a formula in a spreadsheet
}

function quoted(text: string): string {
  return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

export function asLatex(table: Table): string {
  const align = table.columns.map((_, i) =>
    table.rows.every((row) => typeof row[i]?.v !== "string") ? "r" : "l",
  );
  return [
    "% needs \\usepackage{booktabs}",
    `\\begin{tabular}{${align.join("")}}`,
    "\\toprule",
    latexRow(table.columns),
    "\\midrule",
    ...table.rows.map((row) => latexRow(row.map((cell) => cell.t))),
    "\\bottomrule",
    "\\end{tabular}",
    `% ${visibleLine(table.title)}. ${visibleLine(table.note)}`.trimEnd(),
    "",
  ].join("\n");
}

function latexRow(cells: string[]): string {
  return `${cells.map((cell) => [...visibleLine(cell)].map((c) => LATEX[c] ?? c).join("")).join(" & ")} \\\\`;
}

export function fileName(name: string): string {
  return name.replace(/[^A-Za-z0-9.]+/g, "-").replace(/^[-.]+|[-.]+$/g, "") || "figure";
}

export function save(content: string | Blob, name: string, type: string): void {
  const blob = typeof content === "string" ? new Blob([content], { type }) : content;
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

const DRAWN = ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-size", "font-weight"];

/** Save an SVG element as it is drawn: what the page's styles say is written into its elements. */
export function saveSvg(svg: SVGSVGElement, name: string): void {
  const copy = svg.cloneNode(true) as SVGSVGElement;
  const copies = copy.querySelectorAll("*");
  for (const [i, element] of [...svg.querySelectorAll("*")].entries()) {
    const style = getComputedStyle(element);
    for (const name of DRAWN) copies[i]!.setAttribute(name, style.getPropertyValue(name));
  }
  const { width, height } = svg.viewBox.baseVal;
  const ground = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  ground.setAttribute("width", "100%");
  ground.setAttribute("height", "100%");
  ground.setAttribute("fill", getComputedStyle(document.body).getPropertyValue("--panel") || "#fff");
  copy.prepend(ground);
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.setAttribute("width", String(width));
  copy.setAttribute("height", String(height));
  copy.setAttribute("font-family", "sans-serif");
  save(new XMLSerializer().serializeToString(copy), `${fileName(name)}.svg`, "image/svg+xml");
}

/** Save a chart's canvas with its title and legend. */
export function savePng(
  canvas: HTMLCanvasElement,
  name: string,
  title: string,
  legend: { label: string; colour: string }[],
): void {
  const scale = window.devicePixelRatio || 1;
  const style = getComputedStyle(document.body);
  const head = 30 * scale;
  const row = 18 * scale;
  const picture = document.createElement("canvas");
  picture.width = canvas.width;
  const pen = picture.getContext("2d")!;
  const font = `${12 * scale}px sans-serif`;
  pen.font = font;
  const entries = legend.map(({ label, colour }) => ({ label: visibleLine(label), colour, x: 0, line: 0 }));
  let x = 10 * scale;
  let line = 0;
  for (const entry of entries) {
    const wide = 26 * scale + pen.measureText(entry.label).width;
    if (x > 10 * scale && x + wide > canvas.width) {
      x = 10 * scale;
      line++;
    }
    entry.x = x;
    entry.line = line;
    x += wide;
  }
  const foot = (line + 1) * row + 8 * scale;
  picture.height = canvas.height + head + foot;
  pen.fillStyle = style.getPropertyValue("--panel") || "#fff";
  pen.fillRect(0, 0, picture.width, picture.height);
  pen.drawImage(canvas, 0, head);
  pen.fillStyle = style.color;
  pen.font = `600 ${13 * scale}px sans-serif`;
  pen.fillText(visibleLine(title), 10 * scale, 20 * scale);
  pen.font = font;
  for (const entry of entries) {
    const y = canvas.height + head + 14 * scale + entry.line * row;
    pen.fillStyle = entry.colour;
    pen.fillRect(entry.x, y - 8 * scale, 10 * scale, 10 * scale);
    pen.fillStyle = style.color;
    pen.fillText(entry.label, entry.x + 14 * scale, y);
  }
  picture.toBlob((blob) => blob && save(blob, `${fileName(name)}.png`, "image/png"));
}
