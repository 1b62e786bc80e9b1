// The status page: opens with a key, shows what goes on, and connects again after a break.

import assert from "node:assert/strict";
import { check, checkAccess, eventually, open, screenshot, VIEWS } from "./browser.mjs";

const STATUS = {
  model: "tiny",
  phase: "ready",
  started: Math.floor(Date.now() / 1000) - 3 * 3600,
  slots: {
    total: 4,
    context: 4096,
    sequences: 2,
    requests_running: 2,
    requests_waiting: 1,
    pool_tokens: 16384,
    free_context_tokens: 12288,
    evictable_context_tokens: 1024,
    generated_tokens: 5120,
    prompt_tokens: 90000,
    snapshots: 7,
    snapshot_bytes: 25 * 1024 ** 2,
    requests: [
      { id: 1, state: "decode", session: "abc", priority: 0, prompt_tokens: 1200, cached_tokens: 1100, generated_tokens: 80, max_tokens: 2048, age_s: 3.4 },
      { id: 2, state: "waiting", session: "<b>x</b>", priority: 5, prompt_tokens: 10, cached_tokens: 0, generated_tokens: 0, max_tokens: 64, age_s: 0.2 },
    ],
  },
};
const METRICS = `# HELP hearth_draft_tokens_total x
hearth_draft_tokens_total 1000
hearth_draft_tokens_accepted_total 640
hearth_generation_tokens_total 5120
hearth_decode_sequence_steps_total 1600
hearth_prompt_tokens_total 90000
hearth_prompt_tokens_cached_total 81000
hearth_draft_tokens_by_source_total{source="suffix"} 200
hearth_draft_tokens_accepted_by_source_total{source="suffix"} 150
hearth_draft_tokens_by_source_total{source="block"} 0
hearth_gpu_power_watts{gpu="0"} 287.4
`;

export async function test(browser, stub) {
  stub.key = "right";
  stub.status = [STATUS];
  stub.metrics = METRICS;
  stub.props = { runtime: { memory_bytes: 457016880 } };
  const url = `${stub.url}status`;
  for (const [name, view] of Object.entries(VIEWS)) {
    const { page, faults, context } = await open(browser, url, view);
    await page.getByText("This server needs an API key.").waitFor();
    await checkAccess(page, `${name}: the status page asks for a key`);
    const box = page.getByLabel("API key");
    await box.fill("wrong");
    await box.press("Enter");
    await page.getByText("The API key is not one this server knows.").waitFor();
    await box.fill("right");
    await box.press("Enter");
    await page.getByRole("heading", { name: /tiny/ }).waitFor();
    await page.getByText("64 %").waitFor();
    for (let tick = 0; tick < 6; tick++) {
      stub.sendStatus("token", { id: 1, tokens: 10 + tick * 3 });
      await page.waitForTimeout(350);
    }
    const tiles = () => page.locator(".tiles").textContent();
    for (const part of ["Answering2", "1 waiting, room for 4 at once", "64 %3.20 tokens a step", "Guesses of text that repeats75 %right", "90 %", "25 %4,096 of 16,384 tokens", "725.0 MiB", "435.8 MiB", "GPU power watts287.4gpu 0", /3 h \d+ min/]) {
      await eventually(`${name}: ${part}`, async () => (typeof part === "string" ? (await tiles()).includes(part) : part.test(await tiles())));
    }
    await eventually(`${name}: the requests, with their speed`, async () => {
      const rows = await page.locator("tbody tr").allTextContents();
      return rows.length === 2 && rows[0].includes("writes") && /\d\.\d/.test(rows[0]) && rows[1].includes("<b>x</b>");
    });
    await page.locator("polyline").waitFor();
    await checkAccess(page, `${name}: the status page`);
    await screenshot(page, `status-${name}`);
    assert.deepEqual(faults, []);
    await context.close();
  }
  await reconnects(browser, stub, url);
}

async function reconnects(browser, stub, url) {
  const { page, context } = await open(browser, `${url}#key=right`);
  await page.getByRole("heading", { name: /tiny/ }).waitFor();
  check("a key in the address opens the page and goes out of sight", !page.url().includes("right"));
  stub.isStatusDown = true;
  stub.dropWatchers();
  await page.getByText(/Trying again in \d+ s/).waitFor();
  console.log("ok a break is shown");
  stub.isStatusDown = false;
  stub.status = [{ ...STATUS, model: "back again" }];
  await page.getByRole("heading", { name: /back again/ }).waitFor();
  await page.getByText("Live", { exact: true }).waitFor();
  console.log("ok the page connects again by itself");
  await context.close();
}
