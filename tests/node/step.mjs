/** Messages of steps whose only part consists of buckets, as metadata without a record batch (layout 6). */

import { Binary, Field, Schema } from 'apache-arrow';
import { xxh3 } from './job.mjs';

export const STEP = new Schema([new Field('values', new Binary(), false)]);
export const Kind = { GRADIENTS: 1, WANTED: 2, ROWS: 3, UNKNOWN: 4 };
const LAYOUT = 6;
const PART_AT = 24;
const PART_BYTES = 32;
const END = 'end of step';

/** Return a payload with one section: ids (BigUint64Array) of a table, and values (Float32Array or null). */
export function payloadOf(kind, table, ids, values = null) {
    const header = Buffer.alloc(24);
    header.writeUInt32LE(2, 0);
    header.writeUInt32LE(1, 4);
    header.writeUInt16LE(kind, 8);
    header.writeUInt32LE(table, 12);
    header.writeBigUInt64LE(BigInt(ids.length), 16);
    return Buffer.concat([header, Buffer.from(ids.buffer), values ? Buffer.from(values.buffer) : Buffer.alloc(0)]);
}

/** Return a message with a request (null for none) and one part: the blocks [first, first + count) with a payload. */
export function messageOf(request, [first, count], version, payload) {
    const attachment = Buffer.from(request ? JSON.stringify(request) : '');
    const header = Buffer.alloc(PART_AT + PART_BYTES);
    header.writeUInt32LE(LAYOUT, 8);
    header.writeUInt32LE(1, 12);
    header.writeBigUInt64LE(BigInt(header.length + attachment.length), 16);
    header.writeInt32LE(first, PART_AT);
    header.writeInt32LE(count, PART_AT + 4);
    header.writeBigInt64LE(BigInt(version), PART_AT + 8);
    header.writeUInt32LE(payload.length, PART_AT + 20);
    header.writeBigUInt64LE(xxh3(payload), PART_AT + 24);
    header.writeBigUInt64LE(xxh3(header.subarray(8), attachment), 0);
    return Buffer.concat([header, attachment, payload]);
}

/** Return the parts of an answer as { first, count, version, outcome, values }, and whether it ends the step. */
export function partsOf(answer) {
    const isWhole = answer.readUInt32LE(8) === LAYOUT;
    const start = isWhole ? PART_AT : PART_AT - 8;
    const count = answer.readUInt32LE(12);
    const end = isWhole ? Number(answer.readBigUInt64LE(16)) : answer.length;
    if (xxh3(answer.subarray(8, end)) !== answer.readBigUInt64LE(0)) throw new Error('an answer is damaged');
    let at = end;
    const parts = Array.from({ length: count }, (_, n) => {
        const place = start + n * PART_BYTES;
        const size = answer.readUInt32LE(place + 20);
        at += size;
        return {
            first: answer.readInt32LE(place),
            count: answer.readInt32LE(place + 4),
            version: Number(answer.readBigInt64LE(place + 8)),
            outcome: answer.readInt32LE(place + 16),
            values: answer.subarray(at - size, at),
        };
    });
    return { parts, isLast: answer.subarray(start + count * PART_BYTES, end).toString() === END };
}
