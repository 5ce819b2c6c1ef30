package tokenize

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
)

// vocabulary is what the gateway reads of a tokenizer.json for itself: the entries and tokens by which cuts are proved, and
// how text reaches the model. Everything else in the file is for the encoders.
type vocabulary struct {
	AddedTokens   []addedToken    `json:"added_tokens"`
	Normalizer    json.RawMessage `json:"normalizer"`
	PreTokenizer  json.RawMessage `json:"pre_tokenizer"`
	PostProcessor json.RawMessage `json:"post_processor"`
	Model         struct {
		Type         string          `json:"type"`
		Vocab        json.RawMessage `json:"vocab"`
		FuseUnknown  bool            `json:"fuse_unk"`
		ByteFallback bool            `json:"byte_fallback"`
	} `json:"model"`
}

// readVocabulary parses the text of a tokenizer.json.
func readVocabulary(tokenizerJSON []byte) (*vocabulary, error) {
	v := new(vocabulary)
	if err := json.Unmarshal(tokenizerJSON, v); err != nil {
		return nil, fmt.Errorf("not a tokenizer in HuggingFace's format: %w", err)
	}
	if len(v.Model.Vocab) == 0 {
		return nil, errors.New("not a tokenizer in HuggingFace's format: it has no model.vocab")
	}
	return v, nil
}

// byteLevel says whether entries are written in the byte-level alphabet, in which every byte is one printable character.
func (v *vocabulary) byteLevel() bool {
	return strings.Contains(string(v.PreTokenizer), `"ByteLevel"`) || strings.Contains(string(v.Normalizer), `"ByteLevel"`)
}

// entries calls f for each entry of the model's vocabulary with the text it stands for: the bytes of a byte-level entry (which
// may be a part of a character), with spaces for the metaspace mark otherwise. It stops where f returns false.
func (v *vocabulary) entries(f func(text string) bool) error {
	decode := decodeMetaspace
	if v.byteLevel() {
		decode = decodeByteLevel
	}
	var byText map[string]json.RawMessage
	if json.Unmarshal(v.Model.Vocab, &byText) == nil {
		for text := range byText {
			if !f(decode(text)) {
				return nil
			}
		}
		return nil
	}
	var scored [][2]any // Unigram: text and score
	if err := json.Unmarshal(v.Model.Vocab, &scored); err != nil {
		return fmt.Errorf("model.vocab has an unknown form: %w", err)
	}
	for _, pair := range scored {
		if text, ok := pair[0].(string); ok && !f(decode(text)) {
			return nil
		}
	}
	return nil
}

func decodeMetaspace(entry string) string { return strings.ReplaceAll(entry, "▁", " ") }

// byteOf maps the byte-level alphabet back to bytes: printable Latin-1 characters stand for themselves, the other bytes, in
// order, for the characters from U+0100 on.
var byteOf = func() (table [324]int16) {
	for i := range table {
		table[i] = -1
	}
	next := 256
	for b := range 256 {
		if b >= '!' && b <= '~' || b >= 0xa1 && b <= 0xac || b >= 0xae {
			table[b] = int16(b)
			continue
		}
		table[next] = int16(b)
		next++
	}
	return table
}()

func decodeByteLevel(entry string) string {
	out := make([]byte, 0, len(entry))
	for _, r := range entry {
		if int(r) < len(byteOf) && byteOf[r] >= 0 {
			out = append(out, byte(byteOf[r]))
			continue
		}
		out = append(out, string(r)...) // not of the alphabet: an added token, say
	}
	return string(out)
}
