// A client of the gateway in 60 lines, for Node 22 or a browser: node client.mjs ws://127.0.0.1:8001
// It registers an order, stores a checkpoint, waits for the signal "paid", and obeys a cancel.
const PROTOCOL = "runtara.v1.json";

export class Client {
  constructor(url, token) {
    Object.assign(this, { url, token, nextId: 1, waiting: new Map(), seen: 0, resume: undefined, onPush: () => {} });
  }

  connect() {
    return new Promise((resolve, reject) => {
      const socket = (this.socket = new WebSocket(this.url, PROTOCOL));
      const resume = this.resume && { ...this.resume, seen: this.seen };
      socket.onopen = () => this.send({ t: "hello", version: 1, token: this.token, resume });
      socket.onmessage = ({ data }) => {
        for (const envelope of [JSON.parse(data)].flat()) this.take(envelope, resolve, reject);
      };
      socket.onerror = () => reject(new Error(`no connection to ${this.url}`));
      socket.onclose = () => this.closing || setTimeout(() => this.connect().catch(() => {}), 500 * Math.random());
    });
  }

  take(envelope, welcomed, refused) {
    if (envelope.t === "refused") return refused(new Error(envelope.error.message));
    if (envelope.t === "welcome") {
      this.resume = { connection: envelope.connection, secret: envelope.secret };
      for (const [id, call] of this.waiting) if (id > envelope.received) this.send(call.envelope);
      return welcomed(this);
    }
    if (envelope.seq <= this.seen) return; // it was sent again after a reconnect
    this.seen = envelope.seq;
    this.send({ t: "received", seq: this.seen });
    if (envelope.t === "push") return this.onPush(envelope);
    const { resolve, reject } = this.waiting.get(envelope.id);
    this.waiting.delete(envelope.id);
    envelope.error ? reject(Object.assign(new Error(envelope.error.message), envelope.error)) : resolve(envelope.body);
  }

  send(envelope) {
    if (this.socket.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(envelope));
  }

  call(op, instance, body = {}) {
    const envelope = { t: "call", id: this.nextId++, op, instance, body };
    return new Promise((resolve, reject) => {
      this.waiting.set(envelope.id, { envelope, resolve, reject });
      this.send(envelope);
    });
  }

  close() {
    this.closing = true;
    this.send({ t: "goodbye" });
  }
}

const [, script, url, order = "order-1"] = process.argv;
if (url && import.meta.url.endsWith(script.split("/").at(-1))) {
  const client = await new Client(url, process.env.RUNTARA_TOKEN).connect();
  const { epoch } = await client.call("register", order);
  client.onPush = async ({ kind, body }) => {
    if (kind === "signal" && body.signal.type === "cancel")
      await client.call("ack_signal", order, { epoch, signal_id: body.signal.revision });
    if (kind === "closed") console.log(`closed ${body.status}`), client.close();
  };
  await client.call("checkpoint", order, { epoch, checkpoint_id: "charged", state: btoa("42 EUR") });
  console.log("charged");
  const paid = await client.call("wait_signal", order, { epoch, key: "paid", checkpoint_id: "paid" });
  if (paid.outcome === "received") {
    console.log(`paid ${atob(paid.payload)}`);
    console.log((await client.call("event", order, { epoch, type: "completed", payload: btoa("done") })).status);
    client.close();
  }
}
