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
  const lines = [table.columns.map(quoted), ...table.rows.map((row) => row.map(csvCell))];
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

/** Save an SVG element with its present colours. */
export function saveSvg(svg: SVGSVGElement, name: string): void {
  const copy = svg.cloneNode(true) as SVGSVGElement;
  const ink = getComputedStyle(svg);
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.setAttribute("color", ink.color);
  copy.setAttribute("font-family", "sans-serif");
  copy.setAttribute("font-size", "12");
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
  const foot = 26 * scale;
  const picture = document.createElement("canvas");
  picture.width = canvas.width;
  picture.height = canvas.height + head + foot;
  const pen = picture.getContext("2d")!;
  pen.fillStyle = style.getPropertyValue("--panel") || "#fff";
  pen.fillRect(0, 0, picture.width, picture.height);
  pen.drawImage(canvas, 0, head);
  pen.fillStyle = style.color;
  pen.font = `600 ${13 * scale}px sans-serif`;
  pen.fillText(visibleLine(title), 10 * scale, 20 * scale);
  pen.font = `${12 * scale}px sans-serif`;
  let x = 10 * scale;
  const y = canvas.height + head + 16 * scale;
  for (const { label, colour } of legend) {
    pen.fillStyle = colour;
    pen.fillRect(x, y - 8 * scale, 10 * scale, 10 * scale);
    pen.fillStyle = style.color;
    pen.fillText(visibleLine(label), x + 14 * scale, y);
    x += 26 * scale + pen.measureText(visibleLine(label)).width;
  }
  picture.toBlob((blob) => blob && save(blob, `${fileName(name)}.png`, "image/png"));
}
