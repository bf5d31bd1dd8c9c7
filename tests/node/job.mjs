/** What a client needs besides Flight: etcd, checksums, and the placement of rows in buckets. */

import { createXXHash3 } from 'hash-wasm';

const LIFE = 2 ** 40;
const PROTOCOL = 1;
const hasher = await createXXHash3();

export const mapped = (object, change) =>
    Object.fromEntries(Object.entries(object).map(([key, value]) => [key, change(value)]));
export const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/** Return the xxh3-64 of some bytes, one after the other, as a BigInt. */
export function xxh3(...parts) {
    hasher.init();
    parts.forEach((part) => hasher.update(part));
    return BigInt(`0x${hasher.digest('hex')}`);
}

const u64 = (value) => BigInt.asUintN(64, value);

/** The finalizer of splitmix64. */
function mixed(value) {
    let bits = value;
    bits = u64((bits ^ (bits >> 30n)) * 0xbf58476d1ce4e5b9n);
    bits = u64((bits ^ (bits >> 27n)) * 0x94d049bb133111ebn);
    return bits ^ (bits >> 31n);
}

/** Return the bucket of an id (BigInt) of the table `name`. */
export const bucketOf = (name, id) => Number(mixed(u64(id) ^ xxh3(Buffer.from(name))) >> 54n);

/** Return the numbers of a task's records in the order of training. */
export function recordOrder(count, seed, epoch, task) {
    const numbers = [...Array(count).keys()];
    if (seed === null) return numbers;
    const golden = 0x9e3779b97f4a7c15n;
    let key = 0n;
    for (const part of [seed, epoch, task]) key = mixed(u64(key + (BigInt(part) + 1n) * golden));
    const hashes = numbers.map((number) => mixed(u64(key + (BigInt(number) + 1n) * golden)));
    return numbers.sort((a, b) => (hashes[a] === hashes[b] ? a - b : hashes[a] < hashes[b] ? -1 : 1));
}

/** The job's keys in etcd, by etcd's HTTP gateway. */
export class Job {
    constructor(etcd, name) {
        this.etcd = etcd;
        this.root = `/flightedl/${name}/`;
    }

    async call(path, request) {
        const reply = await fetch(`http://${this.etcd}/v3/${path}`, { method: 'POST', body: JSON.stringify(request) });
        return reply.json();
    }

    /** Return the value and the generation of a key, or null. */
    async get(key) {
        const { kvs } = await this.call('kv/range', { key: base64(this.root + key) });
        if (!kvs) return null;
        return { value: JSON.parse(Buffer.from(kvs[0].value, 'base64')), created: Number(kvs[0].create_revision) };
    }

    async offset() {
        return LIFE * ((await this.get('history'))?.value.life ?? 0);
    }

    async generation(key) {
        return (await this.get(key)).created + (await this.offset());
    }

    /** Register a trainer, and return the fields that name it in requests. */
    async register(trainer) {
        const { ID: lease } = await this.call('lease/grant', { TTL: 60 });
        const [key, value] = [base64(`${this.root}trainers/${trainer}`), base64(JSON.stringify({ id: trainer }))];
        await this.call('kv/put', { key, value, lease });
        return { trainer, generation: await this.generation(`trainers/${trainer}`) };
    }

    async master() {
        const { address, protocol } = (await this.get('master/addr')).value;
        if (protocol !== PROTOCOL) throw new Error(`the job speaks version ${protocol} of the protocol, not ${PROTOCOL}`);
        return address;
    }

    async model() {
        return (await this.get('job')).value.model;
    }
}

const base64 = (text) => Buffer.from(text).toString('base64');
