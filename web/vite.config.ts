import { createHash } from "node:crypto";
import { readFileSync, writeFileSync } from "node:fs";
import { defineConfig, type Plugin } from "vite";

const PAGE = process.env.HACRL_PAGE ?? "../src/hacrl/report/page.html";

/** Puts script and styles into index.html, with a policy that allows these two only, and writes page.html. */
function onePage(): Plugin {
  return {
    name: "one-page",
    enforce: "post", // after the styles are in the bundle
    generateBundle(_, bundle) {
      let script = "";
      let style = "";
      for (const part of Object.values(bundle)) {
        if (part.type === "chunk") script += part.code.trim();
        else if (part.fileName.endsWith(".css")) style += String(part.source).trim();
      }
      // the parser would end the elements there
      script = script.replaceAll("</script", "<\\/script").replaceAll("<!--", "<\\!--");
      const policy = [
        "default-src 'none'",
        `script-src '${hash(script)}'`,
        `style-src '${hash(style)}'`,
        "connect-src 'none'",
        "img-src data: blob:",
        "base-uri 'none'",
        "form-action 'none'",
      ].join("; ");
      const page = readFileSync("index.html", "utf-8")
        .replace("CSP", () => policy)
        .replace("STYLE", () => style)
        .replace("SCRIPT", () => script);
      writeFileSync(PAGE, page);
      for (const name of Object.keys(bundle)) delete bundle[name];
    },
  };
}

function hash(content: string): string {
  return `sha256-${createHash("sha256").update(content).digest("base64")}`;
}

export default defineConfig({
  plugins: [onePage()],
  build: {
    target: "es2022",
    modulePreload: false,
    cssCodeSplit: false,
    rollupOptions: { input: "src/main.tsx", output: { format: "iife" } },
  },
});
