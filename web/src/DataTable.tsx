import type { Table } from "./data";
import { asCsv, asLatex, fileName, save } from "./export";
import { Text } from "./Text";

/** Buttons that save a table. */
export function TableButtons({ table }: { table: Table }) {
  const name = fileName(table.name);
  return (
    <div class="actions">
      <button
        type="button"
        aria-label={`Save ${table.title} as CSV`}
        onClick={() => save(asCsv(table), `${name}.csv`, "text/csv")}
      >
        CSV
      </button>
      <button
        type="button"
        aria-label={`Save ${table.title} as LaTeX`}
        onClick={() => save(asLatex(table), `${name}.tex`, "application/x-tex")}
      >
        LaTeX
      </button>
    </div>
  );
}

export function DataTable({ table }: { table: Table }) {
  const numeric = table.columns.map((_, i) => table.rows.every((row) => typeof row[i]?.v !== "string"));
  return (
    <section class="panel table-panel">
      <header class="panel-head">
        <h3>
          <Text text={table.title} />
        </h3>
        <TableButtons table={table} />
      </header>
      {/* biome-ignore lint/a11y/noNoninteractiveTabindex: a wide table scrolls by keyboard */}
      <section class="scroll" tabIndex={0} aria-label={table.title}>
        <table>
          <thead>
            <tr>
              {table.columns.map((column, i) => (
                <th key={column} scope="col" class={numeric[i] ? "number" : ""}>
                  <Text text={column} />
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {table.rows.map((row, r) => (
              <tr key={r}>
                {row.map((cell, i) =>
                  i === 0 ? (
                    <th key={i} scope="row">
                      <Text text={cell.t} />
                    </th>
                  ) : (
                    <td key={i} class={numeric[i] ? "number" : ""}>
                      <Text text={cell.t} />
                    </td>
                  ),
                )}
              </tr>
            ))}
          </tbody>
        </table>
      </section>
      {table.note && <p class="note">{table.note}</p>}
    </section>
  );
}
