// Every view without a finding of axe: light, dark and on a phone; the phone's drawer by touch.

import assert from "node:assert/strict";
import { check, checkAccess, lastReply, open, screenshot, send, VIEWS } from "./browser.mjs";

const REPLY = `# Sorting in Python

Use \`sorted\` for a **new list**, and *list.sort* in place. See [the docs](https://docs.python.org/3/).

\`\`\`python
def quick(items: list[int]) -> list[int]:
    """Sorts by splitting."""
    if len(items) <= 1:
        return items  # nothing to do
    first, *rest = items
    return quick([x for x in rest if x < first]) + [first] + quick([x for x in rest if x >= first])
\`\`\`

| Method | Time | Notes |
|:--|--:|:-:|
| bubble | $O(n^2)$ | slow |
| quick | $O(n \\log n)$ | on average |

#### Steps

1. First
2. Second
   - [x] done
   - [ ] open

> A quotation.

$$\\sum_{i=1}^{n} i = \\frac{n(n+1)}{2}$$
`;

export async function test(browser, stub) {
  for (const [name, view] of Object.entries(VIEWS)) {
    const { page, faults, context } = await open(browser, stub.url, view);
    const isPhone = name === "phone";
    await page.locator("#model", { hasText: "tiny" }).waitFor();
    await screenshot(page, `${name}-empty`);
    await checkAccess(page, `${name}: empty`);
    await send(page, "How do I sort a list in Python?\nShow me the usual ways.");
    const reply = await stub.next();
    reply.progress(1, 2);
    await lastReply(page).getByText("50 %").waitFor();
    await checkAccess(page, `${name}: waiting`);
    reply.think("The user wants to sort. I list the usual ways.");
    reply.say(REPLY);
    await lastReply(page).locator("table").waitFor();
    await checkAccess(page, `${name}: while the reply is written`);
    reply.end();
    await lastReply(page).locator(".figures").waitFor();
    for (const fold of await lastReply(page).locator("summary").all()) await fold.click();
    await checkAccess(page, `${name}: a reply with all folds open`);
    for (const fold of await lastReply(page).locator("summary").all()) await fold.click();
    await page.locator("#thread").evaluate((place) => (place.scrollTop = 0));
    await screenshot(page, name);
    const wide = await page.evaluate(() => document.documentElement.scrollWidth > innerWidth);
    check(`${name}: nothing is wider than the screen`, !wide);
    await lastReply(page).getByRole("button", { name: "New answer" }).click();
    (await stub.next()).refuse(500, { message: "it broke" });
    await lastReply(page).getByText("It broke.").waitFor();
    await checkAccess(page, `${name}: a fault, two versions`);
    await page.locator("article.user").getByRole("button", { name: "Edit message" }).click();
    await page.getByRole("textbox", { name: "Text of the message" }).waitFor();
    await checkAccess(page, `${name}: editing`);
    await page.keyboard.press("Escape");
    if (isPhone) {
      await page.getByRole("button", { name: "Conversations" }).tap();
      await page.locator("#sidebar.open").waitFor();
      await checkAccess(page, `${name}: the drawer`);
      await screenshot(page, "phone-drawer");
      await page.touchscreen.tap(380, 500);
      await page.locator("#sidebar.open").waitFor({ state: "detached" });
      console.log("ok the drawer opens and closes by touch");
      const small = await page.evaluate(() => [...document.querySelectorAll("button.icon")].filter((one) => one.checkVisibility({ visibilityProperty: true }) && one.getBoundingClientRect().width < 24).length);
      check("buttons have room for a finger", small === 0);
    }
    await page.getByRole("button", { name: "Settings" }).first().click();
    await page.getByText("Tools", { exact: true }).click();
    await checkAccess(page, `${name}: settings`);
    await page.keyboard.press("Escape");
    await page.getByRole("dialog").waitFor({ state: "detached" });
    await page.locator("body").press("Control+/");
    await page.getByRole("dialog", { name: "Help" }).waitFor();
    await screenshot(page, `${name}-help`);
    await page.getByText("Licences of the parts").click();
    await checkAccess(page, `${name}: help`);
    check("licences are there", (await page.locator(".licences").textContent()).includes("preact"));
    assert.deepEqual(faults, []);
    await context.close();
  }
}
