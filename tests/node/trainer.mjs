/** A trainer that sends each gradient twice, to show that it counts once. */

import { open } from 'node:fs/promises';
import { Binary, Field, Int32, Int64, RecordBatch, Schema, Struct, Table, Uint64, makeData, vectorFromArray } from 'apache-arrow';
import { connect } from './flight.mjs';
import { bucketOf, recordOrder, sleep, xxh3 } from './job.mjs';
import { Kind, STEP, messageOf, partsOf, payloadOf } from './step.mjs';

const ROW = new Schema([
    new Field('block', new Int32(), false),
    new Field('version', new Int64(), false),
    new Field('checksum', new Uint64(), false),
    new Field('values', new Binary(), false),
]);
const ROW_BYTES = 4 + 8 + 8;

/** Parse a reply with 64-bit seeds, which JavaScript's numbers cannot hold. */
const parsed = (text) => JSON.parse(text.replace(/"seed":(\d+)/g, '"seed":"$1"'));

/** Ask again until an answer is sufficient. */
async function until(ask, isEnough) {
    for (let tries = 0; tries < 100; tries += 1) {
        const reply = await ask();
        if (isEnough(reply)) return reply;
        await sleep(1000 * (reply.retry_after_s || 0.05));
    }
    throw new Error('no sufficient answer arrived');
}

/** Return the records of a JSON lines chunk, or of the part of it that starts after `skipped` records. */
async function recordsOf({ url, offset, size_bytes: size, records }, skipped) {
    const file = await open(url);
    const { buffer } = await file.read(Buffer.alloc(Number(size)), 0, Number(size), Number(offset));
    await file.close();
    const lines = buffer.toString().split('\n').filter(Boolean);
    return lines.slice(skipped, skipped + Number(records)).map((line) => JSON.parse(line));
}

function tableOf(rows) {
    const children = ROW.fields.map(({ name, type }) => vectorFromArray(rows.map((row) => row[name]), type).data[0]);
    const data = makeData({ type: new Struct(ROW.fields), length: rows.length, nullCount: 0, children });
    return new Table(ROW, new RecordBatch(ROW, data));
}

export class Trainer {
    /** `blocks`: number of a block -> { name, start, stop }, as the feed tells. */
    constructor(job, blocks) {
        this.job = job;
        this.blocks = blocks;
        this.seen = { records: [], pushed: [], repeated: [], rowsPushed: [], rowsRepeated: [] };
    }

    async run() {
        this.sender = await this.job.register('node');
        this.master = connect(await this.job.master());
        const { plan_hash: planHash, pservers, placement, declaration } = await this.job.model();
        this.planHash = planHash;
        this.tables = declaration.tables;
        this.placement = placement;
        this.servers = [];
        for (let index = 0; index < pservers; index += 1) {
            const { value } = await this.job.get(`ps/${index}`);
            this.servers.push({ client: connect(value.address), generation: await this.job.generation(`ps/${index}`) });
        }
        let finished = [];
        for (;;) {
            const report = finished;
            const answer = await until(
                () => this.ask({ want: 1, finished: report }),
                ({ reply }) => reply.assignments.length || reply.outcome === 'epochs_done',
            );
            if (answer.reply.outcome === 'epochs_done') return;
            finished = [];
            for (const piece of answer.reply.assignments) finished.push(await this.train(piece, answer.chunks));
        }
    }

    /** Request tasks. Returns the reply and, because at most one task is requested, the chunks of this task. */
    async ask(more) {
        const table = await this.master.get({ verb: 'tasks', ...this.sender, reads_parts: true, ...more });
        const reply = parsed(table.schema.metadata.get('reply'));
        return { reply, retry_after_s: reply.retry_after_s, chunks: table.toArray().map((row) => row.toJSON()) };
    }

    /** Train on a piece of work, and return the report that it is finished. */
    async train(piece, chunks) {
        const { attempt, epoch, position, task, first_batch: first, end_batch: end, batch_count: count } = piece;
        const joining = { ...this.sender, attempt };
        const { member } = await until(() => this.master.act('join', joining), (reply) => reply.member);
        const found = chunks.map((chunk, number) => recordsOf(chunk, piece.parts.length ? piece.parts[number][0] : 0));
        const records = (await Promise.all(found)).flat();
        const order = recordOrder(records.length, piece.seed, epoch, task);
        const size = Math.ceil(records.length / count);
        for (let batch = first; batch < end; batch += 1) {
            const keys = order.slice(batch * size, (batch + 1) * size).map((number) => records[number].k);
            this.seen.records.push(...keys);
            await this.push(member, { epoch, task, batch, batch_count: count }, keys);
        }
        return { epoch, position, attempt, pservers: this.servers.map(({ generation }) => generation) };
    }

    /** Push -1 for element k of the parameter `w` and for row k of each table, for each key k; twice. */
    async push(member, identity, keys) {
        const about = { plan_hash: this.planHash, member, identity, weight: keys.length };
        const pulled = await Promise.all(this.servers.map((server) => this.pull(server, member)));
        for (const [index, { client }] of this.servers.entries()) {
            const rows = pulled[index].map(({ block, version, values }) => {
                const gradient = this.gradient(block, keys, values.length / 4);
                return { block, version, checksum: xxh3(gradient), values: gradient };
            });
            const header = { verb: 'push', ...this.sender, ...about, rows: rows.length };
            const size = rows.reduce((sum, { values }) => sum + ROW_BYTES + values.length, 0);
            for (const seen of [this.seen.pushed, this.seen.repeated]) {
                seen.push(await client.put(header, tableOf(rows), size));
            }
            await this.pushRows(index, { ...about, pull: false }, keys);
        }
    }

    /** Push -1 for row k of the first table for each key k, to one pserver, twice. */
    async pushRows(index, about, keys) {
        const buckets = this.bucketsOf(index);
        if (!buckets) return;
        const [{ name, dim }] = this.tables;
        const [first, count] = buckets;
        const total = this.placement.blocks.reduce((sum, [, length]) => sum + length, 0);
        const isHere = (key) => first - total <= bucketOf(name, BigInt(key)) && bucketOf(name, BigInt(key)) < first - total + count;
        const ids = BigUint64Array.from(keys.filter(isHere).map(BigInt));
        const look = { verb: 'lookup', plan_hash: this.planHash, member: about.member };
        const [found] = await this.step(index, messageOf(look, buckets, 0, payloadOf(Kind.WANTED, 0, ids)));
        const payload = payloadOf(Kind.GRADIENTS, 0, ids, new Float32Array(ids.length * dim).fill(-1));
        const message = messageOf({ verb: 'step', ...this.sender, ...about, rows: count }, buckets, found.version, payload);
        for (const seen of [this.seen.rowsPushed, this.seen.rowsRepeated]) {
            seen.push([...new Set((await this.step(index, message)).map(({ outcome }) => outcome))]);
        }
    }

    /** Return the numbers of a pserver's buckets as [first, count], or null if it has none. */
    bucketsOf(index) {
        let first = this.placement.blocks.reduce((sum, [, length]) => sum + length, 0);
        for (const [owner, length] of this.placement.buckets) {
            if (owner === index) return [first, length];
            first += length;
        }
        return null;
    }

    /** Send a message of one step to a pserver, and return the parts of all answers. */
    async step(index, message) {
        const isLast = (answer) => partsOf(answer).isLast;
        const answers = await this.servers[index].client.exchange({ verb: 'step' }, STEP, [message], isLast);
        return answers.flatMap((answer) => partsOf(answer).parts);
    }

    gradient(block, keys, size) {
        const { name, start } = this.blocks.get(block);
        const gradient = new Float32Array(size);
        keys.filter((key) => name === 'w' && start <= key && key < start + size).forEach((key) => (gradient[key - start] -= 1));
        return new Uint8Array(gradient.buffer);
    }

    async pull({ client }, member) {
        const table = await client.get({ verb: 'pull', plan_hash: this.planHash, member });
        return table.toArray().map((row) => row.toJSON());
    }
}
