package tokenize

import (
	"errors"
	"fmt"
	"slices"
)

// fuzzTexts is how many fuzzed texts both encoders must agree on when a model is loaded.
const fuzzTexts = 400

// encoderName names an encoder in metrics and logs.
type encoderName string

const (
	nameHuggingFace encoderName = "huggingface"
	nameFastokens   encoderName = "fastokens"
	nameNone        encoderName = "none"
)

// errDiffers says that the fast encoder does not give the reference's ids.
var errDiffers = errors.New("its ids differ from HuggingFace's")

// chooseEncoder builds both encoders and returns the fast one if it gives the reference's ids on the whole corpus, else the
// reference and why. The one that is not returned is closed. An error means that the file is no tokenizer at all.
func chooseEncoder(tokenizerJSON, extra []byte, special []string, prefer Encoder) (*encoder, encoderName, error, error) {
	// Building takes seconds for the largest vocabularies; two processors halve it.
	var fast *encoder
	var fastErr error
	built := make(chan struct{})
	go func() {
		defer close(built)
		if prefer != EncoderHuggingFace {
			fast, fastErr = newFastokens(tokenizerJSON, extra)
		}
	}()
	reference, err := newHuggingFace(tokenizerJSON, extra)
	<-built
	switch {
	case err != nil:
		if fast != nil {
			fast.close()
		}
		return nil, nameNone, nil, err
	case prefer == EncoderHuggingFace:
		return reference, nameHuggingFace, errors.New("the configuration asks for it"), nil
	case fastErr != nil:
		return reference, nameHuggingFace, fmt.Errorf("fastokens does not support this tokenizer: %w", fastErr), nil
	}
	if err := agree(reference, fast, corpus(special, fuzzTexts)); err != nil {
		fast.close()
		return reference, nameHuggingFace, fmt.Errorf("fastokens cannot be used: %w", err), nil
	}
	reference.close()
	return fast, nameFastokens, nil, nil
}

// agree returns an error unless both encoders give the same ids for every text, with and without special tokens around it.
func agree(reference, fast *encoder, texts []string) error {
	var want, got []uint32
	for i, text := range texts {
		for _, addSpecial := range [...]bool{false, true} {
			var err error
			if want, err = reference.encode(want[:0], text, addSpecial); err != nil {
				return fmt.Errorf("HuggingFace's encoder on text %d of the corpus: %w", i, err)
			}
			if got, err = fast.encode(got[:0], text, addSpecial); err != nil {
				return fmt.Errorf("text %d of the corpus: %w", i, err)
			}
			if !slices.Equal(want, got) {
				return fmt.Errorf("text %d of the corpus: %w", i, errDiffers)
			}
		}
	}
	return nil
}
