// Package block turns a prompt's token ids into the chain of block hashes by which every gateway names a prefix.
//
// In go the token ids of one prompt, the scope that keeps unlike caches apart, and the marks of what is not text. Out comes
// one 64-bit hash for each full block: h(i) = hash(h(i-1), tokens of block i), with h(-1) the scope's root. Equal hashes at
// position i therefore mean equal prompts up to the end of block i, for the same model, adapter, salt and block size.
//
// The package is pure: nothing random, nothing of the process, no I/O. Two gateways of the same version agree on every hash;
// a change of what is hashed must raise schemaVersion, so that old and new entries never meet. It does not reproduce the
// engine's own block hash, which depends on the engine's version, algorithm and seed.
package block

import (
	"encoding/binary"

	"github.com/cespare/xxhash/v2"
)

// schemaVersion is part of every root. Raise it whenever the same prompt would hash to something else.
const schemaVersion = 1

// Hash names a prefix that ends at a block's end.
type Hash uint64

// Scope is what two prompts must share, besides their tokens, to share KV cache blocks. All fields are hashed; none can be
// read back from a Hash.
type Scope struct {
	// Tokenizer is the fingerprint of the tokenizer that made the ids.
	Tokenizer uint64
	// Model is the base model as the replicas serve it.
	Model string
	// Adapter is the LoRA adapter's name; empty for the base model.
	Adapter string
	// Salt is the request's cache_salt; empty for none.
	Salt string
	// BlockTokens is the engine's block size in tokens.
	BlockTokens int
}

// Root returns h(-1), the hash that the first block of the scope is chained to.
func (s Scope) Root() Hash {
	buf := make([]byte, 0, 64+len(s.Model)+len(s.Adapter)+len(s.Salt))
	buf = binary.LittleEndian.AppendUint64(buf, schemaVersion)
	buf = binary.LittleEndian.AppendUint64(buf, s.Tokenizer)
	buf = binary.LittleEndian.AppendUint64(buf, uint64(s.BlockTokens))
	for _, part := range [...]string{s.Model, s.Adapter, s.Salt} {
		// The length goes first, so that ("ab", "c") and ("a", "bc") differ.
		buf = binary.LittleEndian.AppendUint64(buf, uint64(len(part)))
		buf = append(buf, part...)
	}
	return Hash(xxhash.Sum64(buf))
}

// Mark puts something that is not text (an image, an audio clip) at its place in the prompt: the block that holds token
// Token, and so every later block, depends on Digest.
type Mark struct {
	// Token is the index of the first token that stands for the content.
	Token int
	// Digest identifies the content, for example a hash of its bytes or of its URL.
	Digest uint64
}

// AppendChain appends to dst the hashes of the full blocks of tokens and returns the extended slice. A last partial block
// has no hash. marks must be ordered by Token; those beyond the last full block are ignored. It allocates only where dst
// is too small. A blockTokens below 1 gives no blocks.
func AppendChain(dst []Hash, root Hash, tokens []uint32, blockTokens int, marks []Mark) []Hash {
	if blockTokens < 1 {
		return dst
	}
	var stack [8 + 4*64]byte // No allocation for blocks of up to 64 tokens.
	buf := stack[:]
	if need := 8 + 4*blockTokens; need > len(buf) {
		buf = make([]byte, need)
	}
	prev := root
	next := 0
	for start := 0; start+blockTokens <= len(tokens); start += blockTokens {
		b := buf[:8+4*blockTokens]
		binary.LittleEndian.PutUint64(b, uint64(prev))
		for i, t := range tokens[start : start+blockTokens] {
			binary.LittleEndian.PutUint32(b[8+4*i:], t)
		}
		h := xxhash.Sum64(b)
		for next < len(marks) && marks[next].Token < start+blockTokens {
			var m [24]byte
			binary.LittleEndian.PutUint64(m[:], h)
			binary.LittleEndian.PutUint64(m[8:], marks[next].Digest)
			binary.LittleEndian.PutUint64(m[16:], uint64(marks[next].Token))
			h = xxhash.Sum64(m[:])
			next++
		}
		prev = Hash(h)
		dst = append(dst, prev)
	}
	return dst
}

// Hittable returns how many leading blocks of a prompt of promptTokens tokens an engine can take from its cache at most:
// floor((n-1)/B), since it always computes the last token itself (observed of vLLM 0.32).
func Hittable(promptTokens, blockTokens int) int {
	if promptTokens < 1 || blockTokens < 1 {
		return 0
	}
	return (promptTokens - 1) / blockTokens
}
