// Replies, names and files that try to run something, to load something or to stall the page.

import assert from "node:assert/strict";
import { check, lastReply, open, send, threadTime } from "./browser.mjs";

const RUN = "document.title='broken';window.broken=1";
const REPLIES = [
  `<script>${RUN}</script>`,
  `<img src=x onerror="${RUN}">`,
  `<svg onload="${RUN}"><animate onbegin="${RUN}">`,
  `<iframe srcdoc="<script>parent.${RUN}</script>"></iframe>`,
  `<a href="javascript:${RUN}">x</a>`,
  `[x](javascript:${RUN}) [x](JAVASCRIPT:${RUN}) [x](java&#115;cript:${RUN}) [x](java\tscript:${RUN})`,
  `[x](data:text/html,<script>${RUN}</script>) [x](vbscript:x) [x](file:///etc/passwd) [x](blob:x)`,
  `![x](javascript:${RUN}) ![x](data:image/svg+xml,<svg/onload=alert(1)>) ![x](https://evil.example/pixel.png)`,
  `[x]: javascript:${RUN}\n\n[x] [y][x]`,
  `<https://ok.example/"onmouseover="${RUN}> <javascript:${RUN}>`,
  `[x](https://ok.example "\\"onmouseover=\\"${RUN}")`,
  "```\"><img src=x onerror=alert(1)>\n</code></pre><script>alert(1)</script>\n```",
  "```html\n<script>alert(1)</script>\n```",
  `| <img src=x onerror=alert(1)> |\n|---|\n| <script>alert(1)</script> |`,
  `$\\href{javascript:${RUN}}{x}$ $\\url{javascript:alert(1)}$ $\\includegraphics{https://evil.example/x.png}$ $\\htmlClass{x}{y}$ $\\style{color:red}{x}$`,
  `$$\\text{<img src=x onerror=${RUN}>}$$`,
  "$$\\def\\a{\\a\\a}\\a$$ $$\\def\\b#1{#1#1}\\b{\\b{\\b{\\b{\\b{\\b{\\b{x}}}}}}}$$",
  "<style>*{display:none}</style><link rel=stylesheet href=https://evil.example/x.css><meta http-equiv=refresh content='0;url=https://evil.example'>",
  "<form action=https://evil.example><input name=key></form><base href=https://evil.example>",
  "&lt;script&gt;alert(1)&lt;/script&gt; &#60;img src=x onerror=alert(1)&#62;",
  "\u202e\u2066 right to left \u0000 \uFFFE \u{1F468}\u200D\u{1F469}\u200D\u{1F467}",
];
const STALLS = [
  ["a table of 20,000 rows", `| a | b | c |\n|---|---|---|\n${"| x | y | z |\n".repeat(20_000)}`],
  ["a table of 3,000 columns", `|${"a|".repeat(3000)}\n|${"-|".repeat(3000)}\n|${"x|".repeat(3000)}`],
  ["a line of 500,000 characters", "x".repeat(500_000)],
  ["quotes within quotes", `${">".repeat(5000)} deep`],
  ["lists within lists", Array.from({ length: 300 }, (_, at) => `${"  ".repeat(at)}- x`).join("\n")],
  ["stars without end", "*a _b ".repeat(10_000)],
  ["brackets without end", "[".repeat(30_000)],
  ["backticks of all lengths", Array.from({ length: 600 }, (_, at) => "`".repeat(at)).join("x")],
  ["code of 300,000 characters", `\`\`\`python\n${"x = 'y' # z\n".repeat(25_000)}\`\`\``],
  ["a formula of 200,000 characters", `$$${"\\frac{1}{".repeat(20_000)}$$`],
];

const clean = () => {
  const bad = [...document.querySelectorAll("#thread *")].filter((element) => {
    const tag = element.localName;
    if (["script", "img", "iframe", "style", "link", "meta", "object", "embed", "base", "animate", "video", "audio"].includes(tag)) return true;
    if (tag === "form" && !element.matches(".calls, .editor")) return true;
    return [...element.attributes].some(({ name, value }) => name.startsWith("on") || (/^(href|src|action|xlink:href)$/.test(name) && !/^(https?:|mailto:)/.test(value)));
  });
  return { title: document.title, broken: window.broken, bad: bad.map((element) => element.outerHTML.slice(0, 200)) };
};

export async function test(browser, stub) {
  const { page, faults, context } = await open(browser, stub.url);
  await page.locator("#model", { hasText: "tiny" }).waitFor();
  for (const text of REPLIES) {
    await send(page, "?");
    const reply = await stub.next();
    // In pieces, so that every half of a tag is shown once.
    for (const piece of text.match(/[^]{1,5}/gu)) reply.say(piece);
    reply.think(text);
    reply.end();
    await lastReply(page).locator(".figures").waitFor();
    for (const link of await lastReply(page).locator(".markdown a").all()) await link.hover();
    const { broken, bad, title } = await page.evaluate(clean);
    assert.deepEqual({ text, broken, bad, title }, { text, broken: undefined, bad: [], title: "? · Hearth" });
  }
  check(`${REPLIES.length} hostile replies are text`, true);
  check("raw HTML is shown as it was written", (await page.locator("article.assistant").first().locator(".markdown").textContent()) === REPLIES[0]);
  await names(page, stub);
  const refused = await page.evaluate(() => {
    try {
      document.body.insertAdjacentHTML("beforeend", "<i>x</i>");
      return "ran";
    } catch (thrown) {
      return thrown.name;
    }
  });
  check("the policy lets no text become HTML", refused === "TypeError");
  const loud = faults.filter((fault) => !fault.includes("TrustedHTML"));
  assert.deepEqual(loud, [], "no request to another host, no error");
  await context.close();
  await stalls(browser, stub);
}

/** Texts that come from elsewhere than a reply. */
async function names(page, stub) {
  const markup = "<img src=x onerror=\"window.broken=1\">";
  await page.locator("#composer input[type=file]").setInputFiles({ name: `${markup.replace("/", "")}.txt`, mimeType: "text/plain", buffer: Buffer.from(markup) });
  await send(page, markup);
  let reply = await stub.next();
  reply.call(0, { id: markup, function: { name: markup, arguments: markup } });
  reply.end("tool_calls", undefined, { [`x_source`]: { [markup]: 3 }, draft_n: 3 });
  await lastReply(page).locator(".figures").waitFor();
  await page.getByRole("button", { name: "Give the result" }).click();
  (await stub.next()).refuse(400, { message: markup });
  await lastReply(page).getByText(markup).first().waitFor();
  const found = await page.evaluate(clean);
  assert.deepEqual([found.broken, found.bad], [undefined, []]);
  console.log("ok names of files and tools, arguments, figures and errors are text");
}

async function stalls(browser, stub) {
  const { page, faults, context } = await open(browser, stub.url);
  for (const [name, text] of STALLS) {
    await page.getByRole("button", { name: "New chat" }).first().click();
    const used = await threadTime(page);
    await send(page, "?");
    const reply = await stub.next();
    for (let at = 0; at < text.length; at += 20_000) reply.say(text.slice(at, at + 20_000));
    reply.end();
    await lastReply(page).locator(".figures").waitFor();
    const elements = await page.locator("#thread *").count();
    const ms = await used();
    check(`${name}: ${ms} ms, ${elements} elements`, ms < 15_000 && elements < 70_000);
  }
  await page.locator("#sidebar .title").first().waitFor();
  const more = page.getByRole("button", { name: "Show all 20,000 rows" });
  await page.locator("#sidebar .title").last().click();
  await more.waitFor();
  console.log("ok of a huge table the first rows are shown until the rest is asked for");
  assert.deepEqual(faults, []);
  await context.close();
}
