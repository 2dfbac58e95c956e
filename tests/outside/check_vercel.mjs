// Asks through the `ai` package with createOpenAI() as it comes: two turns with a tool, whole and streamed, over /v1/responses.
// node check_vercel.mjs BASE_URL MODEL FOLDER: the folder has node_modules. Prints a line of JSON.

import { createRequire } from "node:module";
import path from "node:path";
import { pathToFileURL } from "node:url";

const [url, model, folder] = process.argv.slice(2);
const require = createRequire(path.join(folder, "package.json"));
const load = (name) => import(pathToFileURL(require.resolve(name)).href);
const { generateText, streamText, tool, stepCountIs } = await load("ai");
const { createOpenAI } = await load("@ai-sdk/openai");
const { z } = await load("zod");

// What is sent, to see that the second turn refers to items of the first.
const sent = [];
const openai = createOpenAI({
  baseURL: `${url}/v1`,
  apiKey: "unused",
  fetch: (where, options) => {
    sent.push(JSON.parse(options.body));
    return fetch(where, options);
  },
});
const weather = tool({
  description: "The weather in a city.",
  inputSchema: z.object({ city: z.enum(["Rome", "Lima"]) }),
  execute: async ({ city }) => `rain in ${city}`,
});
const asked = {
  model: openai(model),
  tools: { weather },
  maxOutputTokens: 200,
  providerOptions: { openai: { parallelToolCalls: false } },
  maxRetries: 0,
  stopWhen: stepCountIs(2),
  // The first step must call the tool, the second answers.
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
};

const messages = [{ role: "user", content: "How is the weather in Rome?" }];
const first = await generateText({ ...asked, messages });
messages.push(...first.response.messages, { role: "user", content: "And now?" });
const second = streamText({ ...asked, messages, onError: ({ error }) => console.error(error) });
const text = await second.text;
const kinds = (await second.steps).map((step) => step.content.map((part) => part.type));
const references = sent.flatMap((body) => body.input).filter((item) => item.type === "item_reference").length;
const object = await generateText({ model: openai(model), prompt: "Say hello.", maxOutputTokens: 20, maxRetries: 0 });
console.log(JSON.stringify({ first: first.steps.map((step) => step.content.map((part) => part.type)), kinds, references, text: text.length, plain: object.text.length }));
