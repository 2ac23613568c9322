// The page. What it says of the server's work it has from the event stream; while that is down, it says so instead.
// What is to be sent stands in localStorage until the server has it, under the id that it was given here.
"use strict";

const $ = (id) => document.getElementById(id);
const SILENCE_MS = 7000; // the server says something every two seconds
const AGAIN_MS = 1000;
const PHRASES = [
  "What's the weather in Rome?", "Label this urgent", "Charge 5 euros", "Send a mail to ann@example.com",
  "count to 50", "be busy", "be broken",
];

const page = {
  conversation: null, // the one that is shown
  entries: [], // its log, as far as we have heard
  state: null, // how things stand, as the server said it last; null: we don't know
  messages: [], // those that are not answered, as the server said it last; they stay while we are not connected
  words: "", // what the running turn says
  source: null, // the event stream
  connected: false, // whether it is open and was heard lately
  flushing: false,
};

// -- what is to be sent: [{id, conversation, text, at, sent, error}], shared by all tabs of this browser

const queue = {
  all: () => JSON.parse(localStorage.getItem("chat.queue") || "[]"),
  write: (items) => localStorage.setItem("chat.queue", JSON.stringify(items)),
  add: (item) => queue.write([...queue.all(), item]),
  change: (id, how) => queue.write(queue.all().map((one) => (one.id === id ? { ...one, ...how } : one))),
  drop: (isGone) => {
    const left = queue.all().filter((one) => !isGone(one));
    if (left.length !== queue.all().length) queue.write(left);
  },
};

async function flush() {
  if (page.flushing || !page.connected) return;
  page.flushing = true;
  try {
    let next;
    while (page.connected && (next = queue.all().find((one) => !one.sent && !one.error))) {
      const answer = await ask("POST", `conversations/${next.conversation}/messages`, { id: next.id, text: next.text });
      if (answer === null || answer.status >= 500) return; // it may have arrived: the same id again, later
      if (answer.ok) queue.change(next.id, { sent: true });
      else queue.change(next.id, { error: (await answer.json()).error });
      draw();
    }
  } finally {
    page.flushing = false;
  }
}

async function ask(method, path, body) {
  if ($("offline").checked) return null;
  const options = { method, signal: AbortSignal.timeout(10000) };
  if (body) Object.assign(options, { body: JSON.stringify(body), headers: { "content-type": "application/json" } });
  try {
    return await fetch(path, options);
  } catch {
    return null;
  }
}

// -- what the server says

let silence; // rings when nothing was heard for too long
let again; // rings when it is time to connect again

function connect() {
  disconnect();
  // A browser opens six connections to a server, over all its tabs: one that nobody looks at needs none.
  if ($("offline").checked || document.hidden) return;
  const last = page.entries.length ? page.entries.at(-1).seq : 0;
  const about = page.conversation ? `?conversation=${page.conversation}&after=${last}` : "";
  const source = new EventSource(`events${about}`);
  page.source = source;
  source.onerror = lost;
  const on = (name, take) =>
    source.addEventListener(name, (event) => {
      clearTimeout(silence);
      silence = setTimeout(lost, SILENCE_MS);
      take(JSON.parse(event.data));
      draw();
    });
  on("ping", flush); // what did not get through while this stream did
  on("entry", takeEntry);
  on("partial", ({ text }) => (page.words = text));
  on("state", takeState);
  on("deleted", () => leave(page.conversation));
  on("reset", () => ((page.entries = []), connect()));
  silence = setTimeout(lost, SILENCE_MS);
}

function disconnect() {
  page.source?.close();
  clearTimeout(silence);
  clearTimeout(again);
  Object.assign(page, { source: null, connected: false, state: null, words: "" });
}

function lost() {
  disconnect();
  again = setTimeout(connect, AGAIN_MS);
  draw();
}

function takeEntry(entry) {
  page.entries.push(entry);
  page.words = ""; // the entries of a turn's commit take the place of its words
  if (page.state && entry.kind !== "message") page.state.turn = "idle"; // until we are told otherwise
  queue.drop((one) => one.id === entry.key || (entry.data?.events || []).includes(one.id));
}

function takeState(state) {
  Object.assign(page, { state, messages: state.messages, connected: true });
  queue.drop((one) => state.messages.some((message) => message.id === one.id));
  const shown = state.conversations.find((one) => one.id === page.conversation);
  if (shown?.unread) ask("POST", `conversations/${shown.id}/seen`);
  flush();
}

// -- what a person does

function open(conversation) {
  Object.assign(page, { conversation, entries: [], messages: [] });
  history.replaceState(null, "", conversation ? `#${conversation}` : "#");
  connect();
  draw();
  $("text").focus();
}

function say() {
  const text = $("text").value;
  if (!text.trim()) return;
  $("text").value = "";
  if (!page.conversation) open(newId());
  queue.add({ id: newId(), conversation: page.conversation, text, at: new Date().toISOString() });
  draw();
  flush();
}

async function remove() {
  const conversation = page.conversation;
  const answer = await ask("DELETE", `conversations/${conversation}`);
  if (answer?.ok) leave(conversation);
}

function leave(conversation) {
  queue.drop((one) => one.conversation === conversation);
  if (page.conversation === conversation) open(null);
}

const newId = () => crypto.randomUUID();

// -- drawing: everything anew, from what we know; texts are only ever texts

function make(tag, { text, ...attributes } = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== undefined) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  made.append(...children.filter(Boolean));
  return made;
}

const bubble = (whose, state, text, note) =>
  make("li", { class: whose, "data-state": state }, make("div", { class: "bubble", text }),
    note && make("div", { class: "note", text: note }));

function drawnEntry(entry) {
  const said = Object.values(entry.texts || {});
  switch (entry.kind) {
    case "message":
      return [bubble("mine", "landed", entry.texts[entry.key] ?? "…")];
    case "reply":
      return [bubble("theirs", "reply", entry.data.text)];
    case "postroad.stop":
      return [make("li", { class: "event", "data-state": "stop", text: "You stopped this conversation here." })];
    case "postroad.interrupted":
      return [drawnInterruption(entry.data)];
    case "postroad.failed":
      return [
        ...said.map((text) => bubble("mine", "failed", text, "not answered")),
        make("li", { class: "event", "data-state": "failed" }, make("strong", { text: "This could not be answered. " }),
          make("span", { text: entry.data.error })),
      ];
    default:
      return []; // what is nothing to a reader: noops, a model's own record of the conversation
  }
}

function drawnInterruption({ reason, error, operations }) {
  const stopped = reason === "turn.stopped";
  const what = stopped ? "The answer was stopped." : `The answer was interrupted (${error}), and is not tried again by itself.`;
  const done = operations.map((one) =>
    make("li", {}, make("code", { text: `${one.tool}(${Object.values(one.arguments).join(", ")})` }),
      make("span", { text: ` · ${one.effect} · ${one.status === "started" ? "nobody knows how it ended" : one.status}` })));
  return make("li", { class: "event", "data-state": stopped ? "stopped" : "interrupted" }, make("strong", { text: what }),
    done.length > 0 && make("div", { text: "What it had called:" }), done.length > 0 && make("ul", {}, ...done));
}

function drawnMessage(message) {
  if (message.status === "stopped") return bubble("mine", "stopped", message.text, "stopped");
  const { place } = message; // those that a turn is at count too
  const next = isBegun() ? "" : " · next";
  const where = place === null || !page.connected ? "" : place === 0 ? next : ` · ${place} before it`;
  return bubble("mine", "accepted", message.text, `accepted${where}`);
}

function drawnQueued(one) {
  if (one.error) return bubble("mine", "refused", one.text, one.error);
  return one.sent ? bubble("mine", "accepted", one.text, "accepted") : bubble("mine", "queued", one.text, "queued here, not sent");
}

function drawMessages() {
  const known = new Set(page.entries.flatMap((entry) => [entry.key, ...(entry.data?.events || [])]));
  const open = page.messages.filter((message) => !known.has(message.id));
  const drawn = page.entries.map((entry) => ({ at: entry.at, items: drawnEntry(entry) }));
  for (const message of open.filter((one) => one.status === "stopped")) {
    const place = drawn.findIndex((one) => one.at > message.sent);
    drawn.splice(place < 0 ? drawn.length : place, 0, { at: message.sent, items: [drawnMessage(message)] });
  }
  const items = drawn.flatMap((one) => one.items);
  items.push(...open.filter((one) => one.status !== "stopped").map(drawnMessage));
  items.push(...queue.all().filter((one) => one.conversation === page.conversation).map(drawnQueued));
  items.push(...drawnTurn());
  if (!items.length) items.push(make("li", { class: "empty", text: "Nothing was said yet." }));
  const list = $("messages");
  const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 80;
  list.replaceChildren(...items);
  if (atEnd) list.scrollTop = list.scrollHeight;
}

// Whether a worker has taken what waits, be it still there or not.
const isBegun = () => ["running", "lost"].includes(page.state?.turn);

function drawnTurn() {
  if (!page.connected || !page.state) return []; // we don't know, so we say nothing
  const { turn, until, attempts, worker } = page.state;
  const note = (text, state = "retrying") => [make("li", { class: "event", "data-state": state, text })];
  if (isBegun() && (turn === "lost" || !worker))
    return note("The worker is gone; another one takes over in a few seconds.", "unattended");
  if (turn === "running") {
    const nth = attempts > 1 ? ` (attempt ${attempts})` : "";
    return [bubble("theirs", "thinking", page.words || "…", `thinking${nth}`)];
  }
  if (turn !== "backing_off") return [];
  return note(`Attempt ${attempts} failed; it is tried again at ${new Date(until).toLocaleTimeString()}.`);
}

function drawConversations() {
  const listed = page.state?.conversations || page.listed || [];
  page.listed = listed;
  const here = queue.all().filter((one) => !listed.some((known) => known.id === one.conversation));
  const mine = new Map(here.map((one) => [one.conversation, { id: one.conversation, title: one.text, unread: 0 }]));
  if (page.conversation && !listed.some((one) => one.id === page.conversation) && !mine.has(page.conversation))
    mine.set(page.conversation, { id: page.conversation, title: "New conversation", unread: 0 });
  const all = [...mine.values(), ...listed];
  $("conversations").replaceChildren(...all.map((one) => {
    const button = make("button", {}, make("span", { text: one.title }),
      one.unread > 0 && one.id !== page.conversation && make("span", { class: "unread", text: one.unread }));
    button.onclick = () => open(one.id);
    return make("li", { "data-id": one.id, "aria-current": one.id === page.conversation ? "true" : undefined }, button);
  }));
  $("title").textContent = all.find((one) => one.id === page.conversation)?.title ?? "New conversation";
}

function draw() {
  const offline = $("offline").checked;
  const state = offline ? "offline" : page.connected ? "connected" : "lost";
  $("connection").dataset.state = state;
  $("connection").textContent = { offline: "offline", connected: "connected", lost: "not connected" }[state];
  drawConversations();
  drawMessages();
  const pid = page.state?.worker;
  $("worker").dataset.state = page.connected ? (pid ? "up" : "down") : "unknown";
  $("worker").textContent = page.connected ? (pid ? `running, process ${pid}` : "down, begins again in a moment") : "unknown";
  $("kill").disabled = !page.connected || !pid;
  const world = page.state?.world || page.world || [];
  page.world = world;
  $("world").replaceChildren(...world.map((text) => make("li", { text })));
  $("nothing").hidden = world.length > 0;
  const open = page.messages.some((one) => one.status === "open" && one.place !== null);
  $("stop").hidden = !(page.connected && (open || isBegun()));
  $("delete").hidden = !page.conversation;
  $("delete").disabled = !page.connected;
}

// -- beginning

$("say").onsubmit = (event) => (event.preventDefault(), say());
$("text").onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) (event.preventDefault(), say());
};
$("new").onclick = () => open(newId());
$("stop").onclick = () => ask("POST", `conversations/${page.conversation}/stop`);
$("delete").onclick = remove;
$("kill").onclick = () => ask("POST", "worker/kill");
$("offline").onchange = () => (connect(), draw());
window.onstorage = draw; // another tab of this browser
document.onvisibilitychange = () => (connect(), draw());
$("phrases").append(...PHRASES.map((text) => {
  const button = make("button", { text, type: "button" });
  button.onclick = () => (($("text").value = text), say());
  return button;
}));
open(/^#[a-z0-9-]{1,64}$/.test(location.hash) ? location.hash.slice(1) : null);
