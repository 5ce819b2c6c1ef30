package tokenize

import (
	"slices"
	"strings"
)

// framing is what the tokenizer puts around a text where special tokens are asked for.
type framing struct {
	// exact says that it is always before, the text's ids, after. Otherwise the encoder has to be asked for each text.
	exact         bool
	before, after []uint32
}

// probeTexts are the texts by which framing is found. The first must not be empty.
var probeTexts = [...]string{"Hello", "Hello, world!", "", "a", "\n", "0 1", "你好", " x "}

// findFraming asks the encoder how it frames texts, then applies what transformers decides for some classes of tokenizers
// when it loads them, whatever tokenizer.json says.
func findFraming(e *encoder, src *source) (framing, error) {
	f := framing{exact: true}
	for i, text := range probeTexts {
		plain, err := e.encode(nil, text, false)
		if err != nil {
			return f, err
		}
		framed, err := e.encode(nil, text, true)
		if err != nil {
			return f, err
		}
		if i == 0 {
			at := indexOf(framed, plain)
			if at < 0 {
				return framing{}, nil
			}
			f.before = slices.Clone(framed[:at])
			f.after = slices.Clone(framed[at+len(plain):])
		}
		if !slices.Equal(framed, slices.Concat(f.before, plain, f.after)) {
			return framing{}, nil
		}
	}
	switch strings.TrimSuffix(src.config.Class, "Fast") {
	case "LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer":
		// transformers rebuilds the post-processor of these from add_bos_token (default true) and add_eos_token.
		before, ok1 := frameToken(e, src, "bos_token", src.config.AddBOS == nil || *src.config.AddBOS)
		after, ok2 := frameToken(e, src, "eos_token", src.config.AddEOS != nil && *src.config.AddEOS)
		if ok1 && ok2 {
			f.before, f.after = before, after
		}
	}
	return f, nil
}

// frameToken returns the id of the named special token as a list, an empty list where it is not wanted, and whether it is known.
func frameToken(e *encoder, src *source, name string, want bool) ([]uint32, bool) {
	if !want {
		return nil, true
	}
	text, ok := src.chat.SpecialTokens[name].(string)
	if !ok {
		return nil, false
	}
	ids, err := e.encode(nil, text, false)
	return ids, err == nil && len(ids) == 1
}

// indexOf returns where part begins in list, or -1.
func indexOf(list, part []uint32) int {
	for i := 0; i+len(part) <= len(list); i++ {
		if slices.Equal(list[i:i+len(part)], part) {
			return i
		}
	}
	return -1
}
