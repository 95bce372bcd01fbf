// The ordinary calls of the Vercel AI SDK, by two of its providers: node vercel_calls.mjs http://127.0.0.1:8000/v1
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, embedMany, generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";

const where = { baseURL: process.argv[2], apiKey: "none" };
const openai = createOpenAI(where);
const compatible = createOpenAICompatible({ name: "sapwood", ...where, supportsStructuredOutputs: true, includeUsage: true });
const models = { compatible: compatible("demo"), chat: openai.chat("demo"), responses: openai.responses("demo") };

const colour = jsonSchema({
  type: "object",
  properties: { name: { type: "string", enum: ["red", "green", "blue"] } },
  required: ["name"],
  additionalProperties: false,
});
const city = jsonSchema({
  type: "object",
  properties: { city: { type: "string", enum: ["Rome", "Paris"] } },
  required: ["city"],
  additionalProperties: false,
});
const tools = {
  weather: tool({
    description: "Tells the weather of a city.",
    inputSchema: city,
    execute: async ({ city }) => `rain in ${city}`,
  }),
};
const settings = { temperature: 0, maxRetries: 0 };

const calls = {
  async aStreamedChat(model) {
    const failures = [];
    const onError = ({ error }) => failures.push(error);
    const asked = { model, ...settings, maxOutputTokens: 16, system: "You are brief.", prompt: "Say hello.", onError };
    const result = streamText(asked);
    let text = "";
    for await (const piece of result.textStream) text += piece;
    assert.deepEqual(failures, []);
    assert.ok(text);
    assert.ok((await result.usage).outputTokens > 0);
  },
  async aToolCall(model) {
    const asked = { model, ...settings, maxOutputTokens: 128, prompt: "How is the weather in Rome?", tools };
    const answer = await generateText({ ...asked, toolChoice: "required" });
    assert.equal(answer.toolCalls[0].toolName, "weather");
    assert.match(answer.toolResults[0].output, /^rain in /);
    const named = streamText({ ...asked, toolChoice: { type: "tool", toolName: "weather" } });
    assert.equal((await named.toolCalls)[0].toolName, "weather");
  },
  async aToolCallAndWhatTheModelSaysOfIt(model) {
    const answer = await generateText({
      model, ...settings, maxOutputTokens: 128, prompt: "How is the weather in Rome?", tools,
      stopWhen: stepCountIs(2), prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }),
    });
    assert.equal(answer.steps.length, 2);
  },
  async aStructuredAnswer(model) {
    const asked = { model, ...settings, maxOutputTokens: 128, prompt: "Which colour?", output: Output.object({ schema: colour }) };
    assert.match((await generateText(asked)).output.name, /^(red|green|blue)$/);
    assert.match((await streamText(asked).output).name, /^(red|green|blue)$/);
  },
};

let failed = false;
for (const [name, call] of Object.entries(calls)) {
  const tried = Object.entries(models).map(async ([kind, model]) => {
    try {
      await call(model);
      console.log(`${name} by ${kind}: done`);
    } catch (error) {
      failed = true;
      console.error(`${name} by ${kind} failed:`, error);
    }
  });
  await Promise.all(tried);
}
const { embeddings } = await embedMany({ model: compatible.textEmbeddingModel("demo"), values: ["a", "b"] });
assert.deepEqual(embeddings.map((each) => each.length), [640, 640]);
if (failed) process.exit(1);
console.log("ok");
