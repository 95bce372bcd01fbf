// A picture by the Vercel AI SDK, by two of its providers: node vercel_pictures.mjs URL FILE EXPECTED
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText } from "ai";

const [baseURL, file, expected] = process.argv.slice(2);
const where = { baseURL, apiKey: "none" };
const openai = createOpenAI(where);
const compatible = createOpenAICompatible({ name: "sapwood", ...where });
const models = [compatible("seeing"), openai.chat("seeing"), openai.responses("seeing")];
const image = readFileSync(file);
const parts = [
  { type: "image", image, mediaType: "image/png" },
  { type: "file", data: image, mediaType: "image/png" },
];
for (const model of models) {
  for (const part of parts) {
    const content = [part, { type: "text", text: "What?" }];
    const asked = { model, temperature: 0, maxRetries: 0, maxOutputTokens: 8, messages: [{ role: "user", content }] };
    assert.equal((await generateText(asked)).text, expected, `${model.provider} ${part.type}`);
  }
}
console.log("ok");
