/** A copy of the model, to which the messages of the pservers' feeds are applied. */

import { bucketOf, mapped, xxh3 } from './job.mjs';

const BUCKETS = 1024;
const ARRAYS = { float32: Float32Array, float64: Float64Array };

/** Return a typed array with the content of some bytes, which may be unaligned. */
const array = (Kind, bytes) => new Kind(Uint8Array.from(bytes).buffer);

/** Return bfloat16 values, whose bits are the upper halves of those of float32. */
const widened = (bytes) => new Float32Array(Uint32Array.from(array(Uint16Array, bytes), (bits) => bits << 16).buffer);

/** Return the ranges [first, end) as numbers. */
const numbers = (ranges) => ranges.flatMap(([first, end]) => Array.from({ length: end - first }, (_, n) => first + n));

export class Copy {
    /** `declaration`: ModelDeclaration */
    constructor(declaration) {
        this.positions = new Map();
        /** Type to which float32 values were rounded in the last message; empty if they were not. */
        this.wire = '';
        this.parameters = {};
        this.dtypes = {};
        for (const { name, shape, dtype } of declaration.parameters) {
            this.dtypes[name] = ARRAYS[dtype];
            this.parameters[name] = new ARRAYS[dtype](shape.reduce((a, b) => a * b, 1));
        }
        this.dims = Object.fromEntries(declaration.tables.map(({ name, dim }) => [name, dim]));
        /** Table -> for each bucket, id -> { version, epoch, values }. */
        this.tables = {};
        for (const name of Object.keys(this.dims)) {
            this.tables[name] = Array.from({ length: BUCKETS }, () => new Map());
        }
        /** Number of a block -> its elements, as { name, start, stop }. */
        this.blocks = new Map();
        this.blockPlacements = new Map();
        this.bucketPlacements = new Map();
        /** The pserver that sent each bucket. */
        this.owners = Array(BUCKETS).fill(-1);
        this.seen = { bases: 0, increments: 0, values: 0, rows: 0, removed: 0, expired: 0, ignored: 0 };
    }

    since(server) {
        return this.positions.get(server) ?? null;
    }

    /** Apply a message, or return false if another one must be requested. */
    apply(server, table) {
        const header = JSON.parse(table.schema.metadata.get('flightedl.changes'));
        const changes = table.toArray().map((row) => row.toJSON());
        const end = changes.pop();
        if (end?.kind !== 'end' || Number(end.block) !== changes.length) throw new Error('the message is incomplete');
        for (const { ids, versions, epochs, values, checksum } of changes) {
            if (xxh3(ids, versions, epochs, values) !== checksum) throw new Error('a change is damaged');
        }
        const [known, { position, since }] = [this.since(server), header];
        if (known && position.generation < known.generation) return this.ignore();
        if (since === null) {
            if (known?.generation === position.generation && position.number < known.number) return this.ignore();
            this.drop(server);
        } else {
            if (known?.generation !== position.generation || known.life !== position.life) return false;
            if (position.number < known.number) return this.ignore();
            if (since > known.number) return false;
        }
        this.seen[since === null ? 'bases' : 'increments'] += 1;
        const isNewest = (placements) => (number) => (placements.get(number) ?? 0) <= position.placement;
        const blocks = new Set(numbers(header.blocks).filter(isNewest(this.blockPlacements)));
        const buckets = new Set(numbers(header.buckets).filter(isNewest(this.bucketPlacements)));
        const kinds = { values: this.values, clear: this.clear, removed: this.removed, rows: this.rows, expiry: this.expiry };
        this.wire = header.wire;
        for (const change of changes) kinds[change.kind]?.call(this, change, { blocks, buckets });
        blocks.forEach((block) => this.blockPlacements.set(block, position.placement));
        buckets.forEach((bucket) => this.bucketPlacements.set(bucket, position.placement));
        buckets.forEach((bucket) => (this.owners[bucket] = server));
        this.positions.set(server, position);
        return true;
    }

    ignore() {
        this.seen.ignored += 1;
        return true;
    }

    /** Remove everything that a pserver has sent, because its base follows. */
    drop(server) {
        this.owners.forEach((owner, bucket) => owner === server && this.empty(bucket));
    }

    empty(bucket) {
        for (const buckets of Object.values(this.tables)) buckets[bucket].clear();
    }

    values({ name, block, start, stop, values }, owned) {
        if (!owned.blocks.has(Number(block))) return;
        this.parameters[name].set(this.sent(this.dtypes[name], values), Number(start));
        this.blocks.set(Number(block), { name, start: Number(start), stop: Number(stop) });
        this.seen.values += 1;
    }

    /** Return values as an array of its type, although float32 may have been rounded for sending. */
    sent(Kind, bytes) {
        return this.wire && Kind === Float32Array ? widened(bytes) : array(Kind, bytes);
    }

    clear({ start, stop }, owned) {
        for (let bucket = Number(start); bucket < stop; bucket += 1) {
            if (owned.buckets.has(bucket)) this.empty(bucket);
        }
    }

    removed({ name, ids }, owned) {
        for (const id of array(BigUint64Array, ids)) {
            const bucket = bucketOf(name, id);
            if (owned.buckets.has(bucket) && this.tables[name][bucket].delete(id)) this.seen.removed += 1;
        }
    }

    rows({ name, ids, versions, epochs, values }, owned) {
        const dim = this.dims[name];
        const [version, epoch] = [array(Uint32Array, versions), array(Uint32Array, epochs)];
        const all = this.sent(Float32Array, values);
        array(BigUint64Array, ids).forEach((id, n) => {
            const bucket = bucketOf(name, id);
            if (!owned.buckets.has(bucket)) return;
            const row = { version: version[n], epoch: epoch[n], values: all.slice(n * dim, (n + 1) * dim) };
            this.tables[name][bucket].set(id, row);
            this.seen.rows += 1;
        });
    }

    expiry({ name, start, stop, epoch: oldestEpoch, versions }, owned) {
        const oldest = array(BigInt64Array, versions);
        for (let bucket = Number(start); bucket < stop; bucket += 1) {
            if (!owned.buckets.has(bucket)) continue;
            for (const [id, { version, epoch }] of this.tables[name][bucket]) {
                if (version < oldest[bucket - Number(start)] || epoch < oldestEpoch) {
                    this.tables[name][bucket].delete(id);
                    this.seen.expired += 1;
                }
            }
        }
    }

    /** Return all parameters as arrays, and the values of all rows by table and id. Ids are signed, in decimal. */
    content() {
        const rowsOf = (buckets) => buckets.flatMap((rows) => [...rows]);
        const named = ([id, { values }]) => [String(BigInt.asIntN(64, id)), [...values]];
        return {
            parameters: mapped(this.parameters, (array) => [...array]),
            tables: mapped(this.tables, (buckets) => Object.fromEntries(rowsOf(buckets).map(named))),
        };
    }
}
