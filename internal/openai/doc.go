// Package openai reads what OpenAI-compatible clients and engines say to each other, and never changes it.
//
// In go the bytes of a request's body; out comes a Request: the few fields that decide where it should go, as parts of
// those bytes. Parse is strict about JSON and lenient about everything else, since the engine owns validation: a field of
// a wrong type makes a request that is routed by load alone (Request.LoadOnly says why), not an error. The engine reads
// JSON as Python does, so this package does too: of a doubled key the last counts, keys match by exact case, a byte order
// mark and NaN are taken.
//
// In the other direction a UsageScanner watches an answer go by, in pieces of any size, and learns when the first token
// came, what the engine counted, and whether the answer came to its end. It neither holds back nor alters a byte.
//
// WriteError gives the gateway's own errors the shape that clients of the API expect. No text of a request is ever part
// of an error.
package openai
