// Builds the two pages, each one file with its script and style inside, and the policy that a browser holds it to.
//
//   node build.mjs           writes ../src/http/page
//   node build.mjs --check   compares with what is there, and fails if a file differs
//
// The policy names the script and the style by their hashes: nothing else in the page can run, whatever a reply says.

import { createHash } from "node:crypto";
import { mkdirSync, readFileSync, readdirSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";
import esbuild from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const target = join(here, "../src/http/page");
/** All pages, compressed, must stay below this. */
const MOST_GZIPPED = 1_000_000;
/** Licences that the parts of the page may have. */
const LICENCES = ["MIT", "ISC", "BSD-2-Clause", "BSD-3-Clause", "Apache-2.0", "(MPL-2.0 OR Apache-2.0)"];

export const PAGES = [
  { name: "index", script: "chat.tsx", style: "chat.css", title: "Hearth" },
  { name: "status", script: "status.tsx", style: "status.css", title: "Hearth: status" },
];

/** The packages whose files are in a bundle. */
function packagesOf(metafile) {
  const names = Object.keys(metafile.inputs).flatMap((input) => {
    const found = /node_modules\/((?:@[^/]+\/)?[^/]+)\/(?!.*node_modules\/)/.exec(input);
    return found ? [found[1]] : [];
  });
  return [...new Set(names)].sort();
}

/** Name, version and licence text of each package. */
function licenceTexts(names) {
  const texts = names.map((name) => {
    const folder = join(here, "node_modules", name);
    const { version, license } = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
    if (!LICENCES.includes(license)) throw new Error(`${name} has the licence ${license}, which build.mjs does not list`);
    const file = readdirSync(folder).find((entry) => /^(licen[cs]e|copying)/i.test(entry));
    const text = file ? readFileSync(join(folder, file), "utf8").trim() : `Licence: ${license}`;
    return `${name} ${version} (${license})\n\n${text}`;
  });
  return texts.join("\n\n----------------------------------------\n\n");
}

/** The module `virtual:licences`. */
const licencesPlugin = (text) => ({
  name: "licences",
  setup(build) {
    build.onResolve({ filter: /^virtual:licences$/ }, () => ({ path: "licences", namespace: "licences" }));
    build.onLoad({ filter: /.*/, namespace: "licences" }, () => ({ contents: text, loader: "text" }));
  },
});

async function bundle(entry, licences, options = {}) {
  return esbuild.build({
    entryPoints: [join(here, "src", entry)],
    absWorkingDir: here,
    bundle: true,
    write: false,
    minify: true,
    metafile: true,
    format: "iife",
    target: "es2022",
    charset: "utf8",
    legalComments: "none",
    outdir: here,
    loader: { ".woff2": "dataurl" },
    jsx: "automatic",
    jsxImportSource: "preact",
    plugins: [licencesPlugin(licences)],
    ...options,
  });
}

const hash = (text) => `'sha256-${createHash("sha256").update(text).digest("base64")}'`;

/** One page and its policy. */
export async function page({ script, style, title }, licences, options) {
  const code = (await bundle(script, licences, options)).outputFiles[0].text.replaceAll("</script", "<\\/script");
  const css = (await bundle(`style/${style}`, "", options)).outputFiles[0].text;
  const html = `<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1, interactive-widget=resizes-content">
<meta name="color-scheme" content="light dark">
<title>${title}</title>
<link rel="icon" href="data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 32 32'%3E%3Cpath fill='%23b8490f' d='M16 2c2 6 9 9 9 17a9 9 0 0 1-18 0c0-5 3-7 4-11 2 1 3 3 3 5 2-3 3-7 2-11z'/%3E%3C/svg%3E">
<style>${css}</style>
</head>
<body>
<div id="page"><noscript>This page needs JavaScript.</noscript></div>
<script>${code}</script>
</body>
</html>
`;
  const policy = [
    "default-src 'none'",
    `script-src ${hash(code)}`,
    `style-src ${hash(css)}`,
    "img-src data:",
    "font-src data:",
    "connect-src 'self'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    "require-trusted-types-for 'script'",
    "trusted-types 'none'",
  ].join("; ");
  return { html, policy };
}

/** All files of the pages by name. */
export async function files(options) {
  // The chat page has the licences of both: the first build finds the packages.
  const found = await Promise.all(PAGES.map(async ({ script }) => packagesOf((await bundle(script, "")).metafile)));
  const licences = licenceTexts([...new Set(found.flat())].sort());
  const made = {};
  for (const each of PAGES) {
    const { html, policy } = await page(each, licences, options);
    made[`${each.name}.html`] = html;
    made[`${each.name}.csp`] = `${policy}\n`;
  }
  return made;
}

async function main() {
  const made = await files({});
  const size = Object.values(made).reduce((sum, text) => sum + gzipSync(text).length, 0);
  if (size > MOST_GZIPPED) throw new Error(`the pages take ${size} bytes compressed, more than ${MOST_GZIPPED}`);
  if (process.argv.includes("--check")) {
    const differs = Object.entries(made).filter(([name, text]) => readFileSync(join(target, name), "utf8") !== text);
    if (differs.length > 0) {
      console.error(`crates/server/src/http/page differs from its source: ${differs.map(([name]) => name).join(", ")}`);
      console.error("run `npm ci && npm run build` in crates/server/page and commit the result");
      process.exit(1);
    }
    console.log(`the committed pages are those of the source, ${size} bytes compressed`);
    return;
  }
  mkdirSync(target, { recursive: true });
  for (const [name, text] of Object.entries(made)) {
    writeFileSync(join(target, name), text);
    console.log(`${name}: ${text.length} characters, ${gzipSync(text).length} bytes compressed`);
  }
}

if (process.argv[1] === fileURLToPath(import.meta.url)) await main();
