/** A small Arrow Flight client on gRPC. Requests are JSON, and data are tables of apache-arrow. */

import { fileURLToPath } from 'node:url';
import { credentials, loadPackageDefinition } from '@grpc/grpc-js';
import { loadSync } from '@grpc/proto-loader';
import { Message, Table, tableFromIPC, tableToIPC } from 'apache-arrow';

const TIMEOUT_MS = 20_000;
const CONTINUATION = Buffer.from([255, 255, 255, 255]);
const COMMAND = 2;
const definition = loadSync(fileURLToPath(new URL('flight.proto', import.meta.url)), { keepCase: true, defaults: true, longs: Number });
const { FlightService } = loadPackageDefinition(definition).arrow.flight.protocol;
const clients = new Map();

const bytes = (value) => Buffer.from(JSON.stringify(value));
const deadline = () => ({ deadline: Date.now() + TIMEOUT_MS });
const descriptor = (command) => ({ type: COMMAND, cmd: bytes(command) });

/** Return the client of an address or `grpc://` location. */
export function connect(location) {
    const address = location.replace(/^grpc(\+tcp)?:\/\//, '');
    if (!clients.has(address)) {
        const options = { 'grpc.max_receive_message_length': -1, 'grpc.max_send_message_length': -1 };
        clients.set(address, new Client(new FlightService(address, credentials.createInsecure(), options)));
    }
    return clients.get(address);
}

export function closeAll() {
    clients.forEach((client) => client.close());
    clients.clear();
}

class Client {
    constructor(service) {
        this.service = service;
    }

    close() {
        this.service.close();
    }

    /** Send an action and return its reply. */
    async act(verb, request) {
        const [result] = await all(this.service.DoAction({ type: verb, body: bytes(request) }, deadline()));
        return JSON.parse(result.body);
    }

    /** Return the endpoints of a command as `{ location, ticket }`. */
    endpoints(command) {
        return new Promise((resolve, reject) => {
            this.service.GetFlightInfo(descriptor(command), deadline(), (error, info) => {
                if (error) return reject(explained(error));
                const found = info.endpoint.map((each) => ({
                    location: each.location[0].uri,
                    ticket: JSON.parse(each.ticket.ticket),
                }));
                return resolve(found);
            });
        });
    }

    /**
     * Open a stream, send messages that consist of metadata only, and return the metadata of the answers.
     *
     * `isLast`: returns true for the last answer.
     */
    async exchange(command, schema, messages, isLast) {
        const call = this.service.DoExchange(deadline());
        const [first] = unframed(Buffer.from(tableToIPC(new Table(schema), 'stream')));
        call.write({ ...first, flight_descriptor: descriptor(command) });
        messages.forEach((message) => call.write({ app_metadata: message }));
        const answers = [];
        try {
            for await (const { app_metadata: answer } of call) {
                if (!answer.length) continue;
                answers.push(answer);
                if (!isLast(answer)) continue;
                call.write({ app_metadata: bytes({ commit: { batches: 0, rows: 0, bytes: 0 } }) });
                call.end();
            }
        } catch (error) {
            throw explained(error);
        }
        return answers;
    }

    /** Return the table that a ticket stands for. */
    async get(ticket) {
        const messages = await all(this.service.DoGet({ ticket: bytes(ticket) }, deadline()));
        return tableFromIPC(Buffer.concat(messages.filter((each) => each.data_header.length).flatMap(framed)));
    }

    /** Upload a table and return the server's reply. `sizeBytes`: size of its values, for the commit record. */
    async put(command, table, sizeBytes) {
        const call = this.service.DoPut(deadline());
        const replies = all(call);
        const messages = unframed(Buffer.from(tableToIPC(table, 'stream')));
        messages[0].flight_descriptor = descriptor(command);
        const commit = { batches: messages.length - 1, rows: table.numRows, bytes: sizeBytes };
        messages.forEach((each) => call.write(each));
        call.write({ app_metadata: bytes({ commit }) });
        call.end();
        const [reply] = await replies;
        return JSON.parse(reply.app_metadata);
    }
}

async function all(call) {
    const found = [];
    try {
        for await (const message of call) found.push(message);
    } catch (error) {
        throw explained(error);
    }
    return found;
}

/** Add the fields of the server's `extra_info` to an error. Without it, the connection has failed. */
function explained(error) {
    const [detail] = error.metadata?.get('grpc-status-details-bin') ?? [];
    return Object.assign(error, detail ? JSON.parse(detail) : { code: 'broken_off', retryable: true });
}

/** Return a Flight message in the framing of an Arrow IPC stream. */
function framed({ data_header: header, data_body: body }) {
    const padding = Buffer.alloc(-header.length & 7);
    const length = Buffer.alloc(4);
    length.writeInt32LE(header.length + padding.length);
    return [CONTINUATION, length, header, padding, body];
}

/** Return the messages of an Arrow IPC stream as Flight messages. */
function unframed(stream) {
    const found = [];
    let at = 0;
    while (at + 8 <= stream.length) {
        const start = at + 8;
        const end = start + stream.readInt32LE(at + 4);
        if (end === start) break;
        const header = stream.subarray(start, end);
        at = end + Number(Message.decode(header).bodyLength);
        found.push({ data_header: header, data_body: stream.subarray(end, at) });
    }
    return found;
}
