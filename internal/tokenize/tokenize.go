// Package tokenize turns requests into the token ids that the engine will compute for them.
//
// In goes a parsed request, out come the ids of each of its prompts: chat messages through the model's chat template, text
// through the model's tokenizer, ids as they stand. Where the gateway cannot know the ids, the error is an *Unsupported with
// a reason and the request is routed by load alone.
package tokenize
