/**
 * A client in Node, written from `schemas/` alone: it reads a job's model, follows its changes, and trains on tasks.
 *
 * Usage: `node client.mjs read|train ETCD JOB`, `node client.mjs follow ETCD JOB [bfloat16]`, or `node client.mjs golden
 * FILE`. Each line of the input of `read` names a parameter or table, and each line of the input of `follow` requests a
 * copy that is up to date. The answers are lines of JSON.
 */

import assert from 'node:assert/strict';
import { readFile } from 'node:fs/promises';
import { createInterface } from 'node:readline';
import { tableFromIPC } from 'apache-arrow';
import { Copy } from './copy.mjs';
import { closeAll, connect } from './flight.mjs';
import { Job, bucketOf, mapped, recordOrder, sleep, xxh3 } from './job.mjs';
import { Kind, messageOf, partsOf, payloadOf } from './step.mjs';
import { Trainer } from './trainer.mjs';

const say = (value) => console.log(JSON.stringify(value, (_, each) => (typeof each === 'bigint' ? String(each) : each)));
const lines = () => createInterface({ input: process.stdin });

/** Print the rows of each parameter or table that the input names. */
async function read(job) {
    const master = connect(await job.master());
    for await (const name of lines()) {
        const rows = [];
        for (const { location, ticket } of await master.endpoints({ verb: 'read', name })) {
            const table = await connect(location).get(ticket);
            rows.push(...table.toArray().map((row) => row.toJSON()));
        }
        say(rows.map((row) => mapped(row, (value) => (typeof value === 'object' ? [...value] : value))));
    }
}

/** Request and apply the changes of all pservers, until each has answered a new request. */
async function catchUp(job, copy, wire = '') {
    const answered = new Set();
    for (;;) {
        try {
            const endpoints = await connect(await job.master()).endpoints({ verb: 'changes' });
            for (const [server, { location, ticket }] of endpoints.entries()) {
                while (!answered.has(server)) {
                    const table = await connect(location).get({ ...ticket, since: copy.since(server), wait_s: 0, wire });
                    if (copy.apply(server, table)) answered.add(server);
                }
            }
            return copy;
        } catch (error) {
            if (!error.retryable) throw error;
            await sleep(200);
        }
    }
}

async function follow(job, wire) {
    const copy = new Copy((await job.model()).declaration);
    for await (const _ of lines()) {
        await catchUp(job, copy, wire);
        say({ ...copy.content(), seen: copy.seen });
    }
}

async function train(job) {
    const copy = await catchUp(job, new Copy((await job.model()).declaration));
    const trainer = new Trainer(job, copy.blocks);
    await trainer.run();
    await catchUp(job, copy);
    say({ ...copy.content(), ...trainer.seen });
}

/** Compare this client's functions with the examples in a file of the schemas. */
async function golden(path) {
    const known = JSON.parse(await readFile(path));
    const bytes = (start) => Buffer.from(Object.entries(known).find(([name]) => name.startsWith(start))[1], 'base64');
    const values = new Uint8Array(Float32Array.of(1, -2.5).buffer);
    const [row] = tableFromIPC(bytes('push row')).toArray().map((each) => each.toJSON());
    assert.deepEqual(row, { block: 7, version: 3n, checksum: xxh3(values), values });
    const [change] = tableFromIPC(bytes('change:')).toArray().map((each) => each.toJSON());
    assert.deepEqual([change.kind, change.name, change.block, change.stop], ['values', 'w', 7n, 2n]);
    assert.deepEqual([change.checksum, change.values], [xxh3(values), values]);
    const message = bytes('the same step message');
    assert.deepEqual(messageOf(null, [7, 2], 3, Buffer.from(values)), message);
    assert.deepEqual(partsOf(message).parts.map((part) => [part.first, part.count, part.version]), [[7, 2, 3]]);
    assert.deepEqual(partsOf(bytes('header of that step')).parts[0].first, 7);
    const ids = BigUint64Array.of(7n, BigInt.asUintN(64, -3n));
    assert.deepEqual(payloadOf(Kind.GRADIENTS, 0, ids, Float32Array.of(1, -2.5)), bytes('table rows'));
    for (const [text, hash] of Object.entries(known['xxh3-64 of texts'])) {
        assert.equal(xxh3(Buffer.from(text)), BigInt(`0x${hash}`));
    }
    for (const [id, bucket] of Object.entries(known['buckets of ids of the table users'])) {
        assert.equal(bucketOf('users', BigInt(id)), bucket);
    }
    const order = recordOrder(10, 2n ** 64n - 1n, 1, 2);
    assert.deepEqual(order, known['order of 10 records: seed 2^64 - 1, epoch 1, task 2']);
    say({ isSame: true });
}

const [command, ...rest] = process.argv.slice(2);
if (command === 'golden') {
    await golden(...rest);
} else {
    const [etcd, name, wire] = rest;
    await { read, follow, train }[command](new Job(etcd, name), wire);
}
closeAll();
